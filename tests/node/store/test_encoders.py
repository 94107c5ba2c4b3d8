"""Embedders are recognised by type, card or folder, and pool as their files or a card say."""

import json
from pathlib import Path

import pytest
from cards import stage_bytes
from embedders import ENCODERS, copied, encoder
from typer.testing import CliRunner

from exo_node.node.cli.main import app
from exo_node.node.store import listing
from exo_node.node.store.hub_cache import HubCache
from exo_node.node.store.library import KnownModel, ModelLibrary
from exo_node.node.store.listing import recommended
from exo_node.node.store.model_folder import is_model_file
from exo_node.placement.card import ModelCard
from exo_node.placement.cluster import ClusterView, NodeFacts
from exo_node.placement.errors import InvalidCheckpoint
from exo_node.placement.ids import ModelId, NodeId
from exo_node.placement.library import derive_card, packaged_cards
from exo_node.shard.checkpoint.embedders import pooling_of
from exo_node.shard.checkpoint.model_classes import has_class

MODEL = ModelId("tiny")
ONE_NODE = ClusterView(nodes=(NodeFacts(NodeId("n"), "n", 10**10, 10e9),), links=())
TEXT = "sentence_bert_config.json"
POOLING = "1_Pooling/config.json"


def opened(root: Path) -> KnownModel:
    return ModelLibrary((root,), offline=True).get(MODEL)


def put(path: Path, value: object) -> None:
    _ = path.write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_embeds_by_its_publishers_files_and_holds_no_caches(
    tmp_path: Path, family: str
) -> None:
    folder = copied(tmp_path / MODEL, encoder(family))
    library = ModelLibrary((tmp_path,), offline=True)
    model = library.get(MODEL)
    card = model.card
    assert library.file_facts(model).capabilities == ("embeddings",)
    assert card.embeds_by == ("mean" if family == "bert" else "cls")
    assert card.context_length == 1000
    assert card.dtype == "bfloat16"
    layers = card.num_layers
    needs = {stage_bytes(card, 0, layers, True, context, False) for context in (8, 1000)}
    assert len(needs) == 1
    assert needs.pop() < 1.3 * (folder / "model.safetensors").stat().st_size
    (folder / TEXT).unlink()
    assert opened(tmp_path).card.context_length == 1024


def test_tokens_are_those_that_the_text_file_or_the_card_allows(tmp_path: Path) -> None:
    folder = copied(tmp_path / MODEL, encoder("xlm_roberta"))
    for longest, tokens in ((77, 77), (5000, 1024), (None, 1024)):
        put(folder / TEXT, {"max_seq_length": longest})
        assert opened(tmp_path).card.context_length == tokens
    put(folder / "exo-card.toml", "context_length = 50\n")
    assert opened(tmp_path).card.context_length == 50


def test_an_encoder_without_a_dtype_is_float32() -> None:
    config = json.loads((encoder("bert") / "config.json").read_text())
    del config["torch_dtype"]
    card = derive_card(MODEL, config, 1000)
    assert (card.dtype, card.embeds, card.embeds_by) == ("float32", True, "")


def test_a_folder_that_does_not_say_how_it_pools_needs_a_card(tmp_path: Path) -> None:
    folder = copied(tmp_path / MODEL, encoder("bert"))
    (folder / POOLING).unlink()
    with pytest.raises(InvalidCheckpoint, match=r'exo-card\.toml: `pooling = "mean"`') as refused:
        _ = opened(tmp_path)
    assert refused.value.param == "pooling"
    put(folder / "exo-card.toml", 'pooling = "cls"\n')
    assert opened(tmp_path).card.embeds_by == "cls"


def test_pooling_that_changes_is_read_again(tmp_path: Path) -> None:
    folder = copied(tmp_path / MODEL, encoder("bert"))
    library = ModelLibrary((tmp_path,), offline=True)
    assert library.scan()[MODEL].card.embeds_by == "mean"
    put(folder / POOLING, {"pooling_mode": "cls"})
    assert library.scan()[MODEL].card.embeds_by == "cls"


DENSE = [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
LOWER = {"do_lower_case": True}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("modules.json", DENSE, "Dense"),
        ("modules.json", {}, "JSON list"),
        ("modules.json", "[", "malformed JSON"),
        ("modules.json", [7, None], "nothing"),
        (POOLING, {"pooling_mode_max_tokens": True}, "max"),
        (POOLING, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls + mean"),
        (POOLING, {"pooling_mode": ["cls", "mean"]}, "cls"),
        (POOLING, {"pooling_mode": "mean\n\x1b[31m" + "x" * 9999}, r"'mean\n\x1b[31mx"),
        (POOLING, {"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
        (POOLING, {}, "nothing"),
        (POOLING, "[]", "JSON object"),
        (POOLING, "[" * 60_000, "nests its JSON"),
        (POOLING, " " * (16 << 20) + "{}", "over the limit"),
        (TEXT, {"max_seq_length": 0}, "max_seq_length"),
        (TEXT, {"max_seq_length": "many"}, "max_seq_length"),
        (TEXT, {"max_seq_length": True}, "max_seq_length"),
        (TEXT, "\0", "malformed JSON"),
        (TEXT, LOWER, "lower case"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_files_that_mean_other_embeddings_are_refused_by_name(
    tmp_path: Path, name: str, content: object, words: str
) -> None:
    folder = copied(tmp_path / MODEL, encoder("modernbert"))
    put(folder / name, content)
    with pytest.raises(InvalidCheckpoint) as refused:
        _ = opened(tmp_path)
    assert words in refused.value.message
    assert refused.value.message.isprintable() and len(refused.value.message) < 800
    library = ModelLibrary((tmp_path,), offline=True)
    assert MODEL not in library.scan() and MODEL in library.broken


def test_lower_case_is_the_tokenizers(tmp_path: Path) -> None:
    folder = copied(tmp_path / MODEL, encoder("bert"))
    put(folder / TEXT, LOWER)
    assert opened(tmp_path).card.embeds


def test_downloads_fetch_the_files_that_say_how_it_pools() -> None:
    assert all(map(is_model_file, (POOLING, "modules.json", TEXT, "vocab.txt")))
    assert not is_model_file("2_Dense/model.safetensors")
    assert not is_model_file("onnx/model.onnx")


def test_the_caches_other_encoders_are_left_out(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--tiny" / "snapshots" / ("0123456789" * 4)
    snapshot.parent.mkdir(parents=True)
    _ = copied(snapshot, encoder("bert"))
    assert [place.id for place in HubCache(tmp_path).models()] == ["a/tiny@" + "0123456789" * 4]
    (snapshot / POOLING).unlink()
    assert not list(HubCache(tmp_path).models())


def test_a_reranker_is_no_embedder() -> None:
    config = json.loads((encoder("xlm_roberta") / "config.json").read_text())
    assert has_class(config)
    assert not has_class(config | {"architectures": ["XLMRobertaForSequenceClassification"]})


@pytest.mark.parametrize("has", [True, False])
def test_a_list_says_that_an_encoder_embeds_and_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    """It had a speed in tokens and no word about the software that is missing."""
    monkeypatch.setattr(listing, "has_extra", lambda: has)
    _ = copied(tmp_path / MODEL, encoder("bert"))
    library = ModelLibrary((tmp_path,), offline=True)
    (entry,) = [each for each in listing.on_disk(library, ONE_NODE) if each["id"] == MODEL]
    assert listing.describe(library, MODEL, ONE_NODE)["files"]["tensors"] > 9
    assert entry["fits"]["tokens_per_second"] is None
    assert entry["mtp"].startswith("embeds") and ("exo-node[vision]" in entry["mtp"]) != has


# ------------------------------------------------------- models of text that were made embedders


def with_abilities(root: Path) -> tuple[ModelCard, tuple[str, ...]]:
    library = ModelLibrary((root,), offline=True)
    return opened(root).card, library.file_facts(library.get(MODEL)).capabilities


def test_a_folder_that_pools_the_last_token_is_an_embedder_and_nothing_else(tmp_path: Path) -> None:
    folder = copied(tmp_path / MODEL)
    # The base model's, which publishers leave there.
    template = "{% if tools %}{{ tools }}<tool_call>{% endif %}<think>"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    _ = (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    card, listed = with_abilities(tmp_path)
    assert card.embeds and listed == ("embeddings",)
    pooling = folder / POOLING
    _ = pooling.write_text('{"pooling_mode": "lasttoken"}')
    assert pooling_of(folder) == "last"
    _ = pooling.write_text('{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": false}')
    assert pooling_of(folder) == "mean"
    card, listed = with_abilities(tmp_path)
    assert not card.embeds and set(listed) == {"thinking", "tools"}
    _ = pooling.write_text("[")
    with pytest.raises(InvalidCheckpoint, match="malformed JSON"):
        _ = pooling_of(folder)
    pooling.unlink()
    assert pooling_of(folder) is None
    assert not opened(tmp_path).card.embeds


def test_a_persons_card_wins_over_the_folder(tmp_path: Path) -> None:
    folder = copied(tmp_path / MODEL)
    _ = (folder / "exo-card.toml").write_text("capabilities = []\n")
    assert not opened(tmp_path).card.embeds
    (folder / POOLING).unlink()
    _ = (folder / "exo-card.toml").write_text('capabilities = ["embeddings"]\n')
    assert opened(tmp_path).card.embeds


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
