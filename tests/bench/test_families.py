"""The pages about model classes show what the last run of `bench/families.py` measured."""

import json
import runpy
from pathlib import Path
from typing import Any

from exo_node.placement.library import packaged_cards
from exo_node.shard.checkpoint.model_classes import FROM_VLM

BENCH = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "families.py"))
PAGE, documented = BENCH["PAGE"], BENCH["documented"]


def rows() -> list[dict[str, Any]]:
    return json.loads(BENCH["RESULTS"].read_text())["rows"]


def test_the_pages_are_fresh() -> None:
    """`python bench/families.py --docs`"""
    page = PAGE.read_text()
    assert BENCH["BEGIN"] in page
    assert documented(page, rows()) == page
    report = json.loads(BENCH["RESULTS"].read_text())
    assert BENCH["markdown"](report) == BENCH["CLASSES"].read_text()


def test_a_class_that_differs_or_cannot_be_split_everywhere_says_so() -> None:
    worse = [
        row | {"one_node": "same / 3 ids", "borders": "2, 3 of 5"}
        if row["name"] == "llama"
        else row
        for row in rows()
    ]
    assert "| Llama | llama | same / 3 ids | at 2, 3 of 5 | no |" in documented(
        PAGE.read_text(), worse
    )


def test_every_packaged_cards_class_of_mlx_lm_is_in_the_table() -> None:
    listed = {name for names in BENCH["FAMILIES"].values() for name in names}
    types = {card.model_type for card in packaged_cards().values()}
    assert types - {*FROM_VLM.values()} <= listed
