"""The facts of lists of models, and the order in which models are recommended."""

from typing import Any

from exo_node.node.store.file_facts import FileFacts
from exo_node.node.store.listing import facts, recommended
from exo_node.placement.fitting import Fit
from exo_node.placement.library import packaged_cards


def test_models_with_a_shortened_context_are_recommended_last() -> None:
    card = next(card for card in packaged_cards().values() if card.context_length > 32768)
    entries: list[dict[str, Any]] = [
        facts(card, Fit(1, 1, 0.01, context), FileFacts(())) | {"id": str(context)}
        for context in (8192, 32768)
    ]
    assert [entry["fits"]["shortened"] for entry in entries] == [True, False]
    entries[0]["size_bytes"] = 2 * entries[1]["size_bytes"]
    assert [entry["id"] for entry in recommended(entries)] == ["32768", "8192"]
    assert not facts(card, Fit(0, 1, 0.0, 0), FileFacts(()))["fits"]["shortened"]
