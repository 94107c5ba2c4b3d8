"""Embedders are told apart from models that answer, by their card or their folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from embedders import copied
from typer.testing import CliRunner

from exo_node.node.cli.main import app
from exo_node.node.store.library import ModelLibrary
from exo_node.node.store.listing import recommended
from exo_node.placement.errors import InvalidCheckpoint
from exo_node.placement.ids import ModelId
from exo_node.placement.library import packaged_cards
from exo_node.shard.checkpoint.embedders import pooling_of

MODEL = ModelId("tiny")


def opened(root: Path) -> Any:
    library = ModelLibrary((root,), offline=True)
    model = library.get(MODEL)
    return model.card, library.file_facts(model).capabilities


def test_a_folder_that_pools_the_last_token_is_an_embedder_and_nothing_else(tmp_path: Path) -> None:
    folder = copied(tmp_path / MODEL)
    # The base model's, which publishers leave there.
    template = "{% if tools %}{{ tools }}<tool_call>{% endif %}<think>"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    _ = (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    card, listed = opened(tmp_path)
    assert card.embeds and listed == ("embeddings",)
    pooling = folder / "1_Pooling" / "config.json"
    _ = pooling.write_text('{"pooling_mode": "lasttoken"}')
    assert pooling_of(folder) == "last"
    _ = pooling.write_text('{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": false}')
    assert pooling_of(folder) == "mean"
    card, listed = opened(tmp_path)
    assert not card.embeds and set(listed) == {"thinking", "tools"}
    _ = pooling.write_text("[")
    with pytest.raises(InvalidCheckpoint, match="malformed JSON"):
        _ = pooling_of(folder)
    pooling.unlink()
    assert pooling_of(folder) is None
    assert not opened(tmp_path)[0].embeds


def test_a_persons_card_wins_over_the_folder(tmp_path: Path) -> None:
    folder = copied(tmp_path / MODEL)
    _ = (folder / "exo-card.toml").write_text("capabilities = []\n")
    assert not opened(tmp_path)[0].embeds
    (folder / "1_Pooling" / "config.json").unlink()
    _ = (folder / "exo-card.toml").write_text('capabilities = ["embeddings"]\n')
    assert opened(tmp_path)[0].embeds


def test_packaged_embedders_and_their_quantisations_embed() -> None:
    cards = packaged_cards()
    for size in ("0.6B", "4B", "8B"):
        card = cards[ModelId(f"Qwen/Qwen3-Embedding-{size}")]
        assert card.embeds and not card.native_mtp
        assert all(card.as_variant(variant).embeds for variant in card.variants)


def test_embedders_are_not_recommended_for_answers() -> None:
    fits = {"nodes": 1, "tokens_per_second": 50.0}
    entries = [
        {"id": name, "fits": fits, "size_bytes": size, "capabilities": abilities}
        for name, size, abilities in (("large", 9, ["embeddings"]), ("small", 3, ["tools"]))
    ]
    assert [entry["id"] for entry in recommended(entries)] == ["small"]


@pytest.mark.parametrize("command", [["verify"], ["bench", "mtp"]])
def test_commands_that_need_answers_refuse_an_embedder(tmp_path: Path, command: list[str]) -> None:
    _ = copied(tmp_path / MODEL)
    result = CliRunner().invoke(app, [*command, MODEL, "--models-dir", str(tmp_path)])
    assert result.exit_code != 0
    assert "is an embedder" in f"{result.output} {result.exception}"
