"""A block drafter that a card names: found, measured against its model, counted and loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
from drafters import drafter_config, make_drafter
from engines import answer, engine_of, load_quietly, request
from models import make_checkpoint

from exo_node.node.machine.settings import installed_distributions, load_settings
from exo_node.node.placements.local_model import resolve
from exo_node.node.store.hub_cache import HubCache
from exo_node.node.store.library import ModelLibrary
from exo_node.node.store.listing import mtp_words
from exo_node.placement.card import BlockDrafter
from exo_node.placement.errors import InvalidCheckpoint, InvalidRequest
from exo_node.placement.ids import ModelId
from exo_node.shard.checkpoint.drafters import DrafterUnusable

TARGET, DRAFTER = ModelId("target"), ModelId("a/drafter")
CARD = '[drafter]\nmodel = "a/drafter"\ndefault_k = 2\n'


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, whose card names a drafter that is not there yet."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = make_checkpoint(tmp_path / "models" / TARGET, "qwen3", dtype="float32", vocab=4096)
    _ = (folder / "exo-card.toml").write_text(CARD)
    return tmp_path / "models"


def library(models: Path) -> ModelLibrary:
    return ModelLibrary((models,), offline=True)


def with_drafter(models: Path, **changes: Any) -> ModelLibrary:
    folder = make_drafter(models / DRAFTER, drafter_config(4096))
    _ = (folder / "config.json").write_text(json.dumps(drafter_config(4096) | changes))
    return library(models)


def test_the_sizes_of_a_drafter_are_read_from_its_files(models: Path) -> None:
    lib = library(models)
    missing = lib.scan()[TARGET]
    assert missing.card.drafter is not None and missing.card.drafter.weight_bytes == 0
    folder = make_drafter(models / DRAFTER, drafter_config(4096))
    for model in (lib.scan()[TARGET], lib.get(TARGET)):
        drafter = model.card.drafter
        assert drafter is not None and (drafter.default_k, drafter.max_k) == (2, 7)
        stored = (folder / "model.safetensors").stat().st_size
        assert 0 < stored - drafter.weight_bytes < 10_000
        assert drafter.cached_numbers == 2 * 2 * 2 * 16
        assert lib.head(model).loaded
        assert mtp_words(model.card, lib.head(model)) == (
            "the block drafter a/drafter is here; drafts up to 7 a round"
        )


def test_sizes_in_a_card_hold_where_the_drafter_is_not(models: Path) -> None:
    card_file = models / TARGET / "exo-card.toml"
    _ = card_file.write_text(CARD + "weight_bytes = 77\ncached_numbers = 5\n")
    drafter = with_drafter(models).get(TARGET).card.drafter
    assert drafter is not None and (drafter.weight_bytes, drafter.cached_numbers) == (77, 5)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vocab_size": 4095}, "a vocabulary of 4095 ids, and this one has 4096"),
        ({"block_size": 4}, "drafts at most 3 tokens a round"),
        ({"architectures": ["DSparkDraftModel"]}, "DSparkDraftModel"),
        ({"dflash_config": 5}, "mask_token_id in config.json of"),
    ],
)
def test_one_that_does_not_fit_is_named_in_the_list(
    models: Path, changes: dict[str, Any], why: str
) -> None:
    lib = with_drafter(models, **changes)
    head = lib.head(lib.get(TARGET))
    assert not head.loaded and why in head.reason and "a/drafter" in head.reason


def test_one_that_is_absent_or_damaged_is_named_too(models: Path) -> None:
    lib = library(models)
    assert "`exo-node models pull a/drafter`" in lib.head(lib.get(TARGET)).reason
    lib = with_drafter(models)
    _ = (models / DRAFTER / "model.safetensors").write_bytes(b"no")
    reason = lib.head(lib.get(TARGET)).reason
    assert "model.safetensors" in reason and "the block drafter a/drafter" in reason


def test_a_snapshot_that_may_not_be_read_ends_no_load(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locate(_cache: HubCache, repository: str, _revision: str | None = None) -> Path:
        raise InvalidCheckpoint(f"{repository} belongs to another user")

    monkeypatch.setattr(HubCache, "locate", locate)
    lib = library(models)
    reason = lib.head(lib.get(TARGET)).reason
    assert reason == (
        "the block drafter a/drafter cannot be read: a/drafter belongs to another user"
    )
    spec = resolved(models).spec
    assert not spec.drafter_path and spec.drafter_fault.endswith(f": {reason}"), "of which node"
    assert load_quietly(spec).head_state == spec.drafter_fault


def test_a_placement_names_a_drafter_by_id_or_folder(models: Path) -> None:
    lib = with_drafter(models, block_size=4)
    bare = lib.get(TARGET).card.model_copy(update={"drafter": None})
    by_id = lib.drafters.choose(bare, DRAFTER)
    assert by_id == lib.drafters.choose(bare, str(models / DRAFTER))
    assert (by_id.model, by_id.default_k, by_id.max_k) == (DRAFTER, 1, 3), "of a block of 4 rows"
    assert by_id.weight_bytes and by_id.cached_numbers
    own = bare.model_copy(update={"drafter": BlockDrafter(model=DRAFTER, default_k=2, max_k=2)})
    assert lib.drafters.choose(own, DRAFTER).max_k == 2, "as the card has it"


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("a/other", {}, "the block drafter a/other is not on this machine"),
        (str(TARGET), {}, "target is no block drafter that is implemented here"),
        ("/etc", {}, "/etc is in none of the head's folders of models"),
        ("../models/a/drafter", {}, "is not on this machine"),
        ("NONE", {}, "is not on this machine"),
        ("a/\0", {}, "is not on this machine"),
        ("/a\0", {}, "is in none of"),
        (DRAFTER, {"vocab_size": 4095}, "a vocabulary of 4095 ids"),
        (DRAFTER, {"hidden_size": 32}, "hidden states of 32 numbers"),
        (DRAFTER, {"num_target_layers": 9}, "9 layers"),
        (DRAFTER, {"dflash_config": []}, "mask_token_id in config.json of"),
        (DRAFTER, {"vocab_size": None}, "the block drafter a/drafter cannot be read"),
    ],
)
def test_one_that_a_placement_cannot_have_is_refused_by_its_field(
    models: Path, name: str, changes: dict[str, Any], why: str
) -> None:
    lib = with_drafter(models, **changes)
    with pytest.raises(InvalidRequest) as caught:
        _ = lib.drafters.choose(lib.get(TARGET).card, name)
    message = caught.value.message
    assert caught.value.param == "drafter" and why in message
    assert message.startswith("drafter: ") and message.endswith(", or leave it out")
    embedder = lib.get(TARGET).card.model_copy(update={"capabilities": ("embeddings",)})
    with pytest.raises(InvalidRequest, match="an embedder, which drafts nothing"):
        _ = lib.drafters.choose(embedder, name)


def test_one_for_layers_that_pass_on_one_stream_does_not_fit_a_model_with_several(
    models: Path,
) -> None:
    """As the runner finds, which is fed what the layers give."""
    lib = with_drafter(models)
    card = lib.get(TARGET).card.model_copy(update={"hidden_streams": 4})
    why = "hidden states of 64 numbers, and this one has 256"
    with pytest.raises(InvalidRequest, match=why):
        _ = lib.drafters.choose(card, DRAFTER)
    with pytest.raises(DrafterUnusable, match=why):
        _ = lib.drafters.facts(card)


def test_a_drafter_is_no_model_that_answers(models: Path) -> None:
    lib = with_drafter(models)
    assert set(lib.scan()) == {TARGET, "demo"}
    assert "is a block drafter" in str(lib.broken[DRAFTER])
    with pytest.raises(InvalidCheckpoint, match=r"under drafter\.model"):
        _ = lib.get(DRAFTER)


def resolved(models: Path) -> Any:
    settings = load_settings(
        {"data_dir": models.parent / "data", "models_dirs": (models,)}, {"HOME": str(models)}
    )
    return resolve(TARGET, settings, installed_distributions())


def test_a_model_is_loaded_with_the_drafter_of_its_card(models: Path) -> None:
    _ = with_drafter(models)
    spec = resolved(models).spec
    assert (spec.drafter, spec.drafter_path) == (DRAFTER, str(models / DRAFTER))
    assert spec.native_mtp and spec.max_draft_tokens == 7 and not spec.mtp_hidden
    loaded = load_quietly(spec)
    assert loaded.head_state == "loaded"
    served = engine_of(loaded, spec)
    plain, drafted = (answer(served, request([5, 6, 7], k, 12)) for k in (0, 3))
    assert plain.ids == drafted.ids
    assert drafted.stats.drafter_kind == "block_drafter"


def test_the_plan_counts_the_drafter(models: Path) -> None:
    lib = with_drafter(models)
    card = lib.get(TARGET).card
    assert card.drafter is not None
    size, row = card.drafter.weight_bytes, 4 * card.drafter.cached_numbers
    assert (card.draft_bytes, card.draft_bytes_per_token) == (size, row)
    spec = resolved(models).spec
    assert spec.drafter_bytes == size


def test_a_model_whose_drafter_is_absent_answers_without_and_says_why(models: Path) -> None:
    spec = resolved(models).spec
    loaded = load_quietly(spec)
    assert loaded.head is None and "a/drafter is not on this machine" in loaded.head_state
