"""Models on a disk: folders one and two levels deep, and the Hugging Face cache."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import COMMIT
from huggingface_hub import constants
from models import DEMO, Family, make_checkpoint

from exo_node.node.store.library import ModelLibrary
from exo_node.placement.errors import ExoNodeError, ModelNotFound
from exo_node.placement.ids import ModelId


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    yield folder


def in_cache(cache: Path, repository: str, *, ref: str = "main", commit: str = COMMIT) -> Path:
    """A snapshot as the hub's client leaves it, but for its links."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    if ref:
        (folder / "refs" / ref).write_text(commit)
    return make_checkpoint(folder / "snapshots" / commit, "qwen3_5")


def ids(library: ModelLibrary) -> set[str]:
    return set(library.scan())


def test_folders_hold_models_and_publishers_of_models(tmp_path: Path, cache: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    make_checkpoint(first / "own", "llama")
    make_checkpoint(first / "publisher" / "quantised", "llama")
    make_checkpoint(second / "own", "qwen3")
    make_checkpoint(second / "other", "qwen3")
    make_checkpoint(second / "publisher" / "model" / "too-deep", "qwen3")
    (second / "notes").mkdir()
    library = ModelLibrary((first, second, tmp_path / "gone"), offline=True)
    assert ids(library) == {"demo", "own", "publisher/quantised", "other"}
    assert library.broken == {}
    assert library.get(ModelId("own")).card.model_type == "llama"
    assert library.get(ModelId("publisher/quantised")).folder == first / "publisher" / "quantised"


def test_a_whole_model_of_the_cache_is_listed_and_found(tmp_path: Path, cache: Path) -> None:
    snapshot = in_cache(cache, "me/tiny")
    library = ModelLibrary(offline=True)
    assert ids(library) == {"demo", "me/tiny"}
    assert library.get(ModelId("me/tiny")).folder == snapshot


def test_a_template_and_a_card_both_name_abilities(cache: Path) -> None:
    snapshot = in_cache(cache, "deepseek-ai/DeepSeek-R1")
    _ = (snapshot / "chat_template.jinja").write_text(
        "{% if tools %}{{ tools }}<tool_call>{% endif %}"
    )
    library = ModelLibrary(offline=True)
    model = library.scan()[ModelId("deepseek-ai/DeepSeek-R1")]
    assert "tools" not in model.card.capabilities
    facts = library.file_facts(model)
    assert facts.capabilities == ("thinking", "tools")
    assert len(facts.digest) == 32
    (snapshot / "chat_template.jinja").unlink()
    changed = library.file_facts(model)
    assert changed.capabilities == ("thinking",)
    assert changed.digest != facts.digest


def test_another_revision_has_its_name_after_the_id(cache: Path) -> None:
    in_cache(cache, "me/tiny")
    tagged = in_cache(cache, "me/tiny", ref="v2", commit="b" * 40)
    bare = in_cache(cache, "me/tiny", ref="", commit="d" * 40)
    library = ModelLibrary(offline=True)
    assert ids(library) == {"demo", "me/tiny", "me/tiny@v2", f"me/tiny@{'d' * 40}"}
    assert library.get(ModelId("me/tiny@v2")).folder == tagged
    assert library.get(ModelId(f"me/tiny@{'d' * 40}")).folder == bare


def test_a_cache_holds_much_that_is_no_model(cache: Path) -> None:
    for name, kind in (("encoder", "bert"), ("nothing", None)):
        folder = in_cache(cache, f"me/{name}")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    tokenizer = in_cache(cache, "me/tokenizer")
    (tokenizer / "model.safetensors").unlink()
    (cache / "datasets--me--data").mkdir()
    (cache / "models--me--a--b" / "snapshots" / COMMIT).mkdir(parents=True)
    library = ModelLibrary(offline=True)
    assert ids(library) == {"demo"}
    assert library.broken == {}


def test_an_unfinished_download_names_the_command_that_resumes_it(cache: Path) -> None:
    snapshot = in_cache(cache, "me/tiny")
    (snapshot / "model.safetensors").unlink()
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    (blobs / "0.incomplete").write_bytes(b"half")
    library = ModelLibrary(offline=True)
    assert ids(library) == {"demo"}
    assert "`exo-node models pull me/tiny`" in library.broken[ModelId("me/tiny")].message


def test_the_list_follows_the_disk(tmp_path: Path, cache: Path) -> None:
    root = tmp_path / "models"
    library = ModelLibrary((root,), offline=True)
    assert ids(library) == {"demo"}
    folder = make_checkpoint(root / "new", "llama")
    assert ids(library) == {"demo", "new"}
    (folder / "exo-card.toml").write_text("context_length = 77\n")
    assert library.scan()[ModelId("new")].card.context_length == 77
    (folder / "exo-card.toml").write_text("context_length = 'x'\n")
    assert ids(library) == {"demo"}
    assert "context_length" in library.broken[ModelId("new")].message
    weights = folder / "model.safetensors"
    (folder / "exo-card.toml").unlink()
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "truncated" in str(library.scan() and library.broken[ModelId("new")])
    shutil.rmtree(folder)
    assert ids(library) == {"demo"} and library.broken == {}


def test_only_changed_models_are_read_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "models" / "one", "llama")
    library = ModelLibrary((tmp_path / "models",), offline=True)
    first = library.scan()
    monkeypatch.setattr(library, "_open", None)
    assert library.scan() == first


def test_a_whole_head_is_used_without_a_card_and_a_stripped_one_is_not(
    tmp_path: Path, cache: Path
) -> None:
    shutil.copytree(DEMO, tmp_path / "models" / "whole")
    make_checkpoint(tmp_path / "models" / "none", "llama")
    library = ModelLibrary((tmp_path / "models",), offline=True)
    whole, none = library.get(ModelId("whole")).card, library.get(ModelId("none")).card
    assert whole.native_mtp is not None and none.native_mtp is None
    assert (whole.native_mtp.default_k, whole.native_mtp.max_k) == (1, 7)
    (tmp_path / "models" / "whole" / "exo-card.toml").write_text(
        "native_mtp = {default_k = 3, max_k = 4}\n"
    )
    whole = library.get(ModelId("whole")).card
    assert whole.native_mtp is not None and whole.native_mtp.default_k == 3


@pytest.mark.parametrize(
    ("family", "most"), [("mimo_v2_flash", 3), ("step3p5", 3), ("qwen3_5", 7), ("deepseek_v3", 7)]
)
def test_the_first_layer_of_a_head_of_three_drafts_no_more_than_they_would(
    family: Family, most: int, tmp_path: Path, cache: Path
) -> None:
    make_checkpoint(tmp_path / "models" / "head", family)
    card = ModelLibrary((tmp_path / "models",), offline=True).get(ModelId("head")).card
    assert card.native_mtp is not None and card.native_mtp.max_k == most


@pytest.mark.parametrize("name", ["../x", "a/../b", "me/tiny@../x", "me/none", "a@b", "/", "a/b/c"])
def test_no_name_leads_out_of_the_cache(cache: Path, name: str) -> None:
    in_cache(cache, "me/tiny")
    with pytest.raises(ModelNotFound):
        ModelLibrary(offline=True).get(ModelId(name))


def test_a_loop_of_links_ends_no_scan(tmp_path: Path, cache: Path) -> None:
    root = tmp_path / "models"
    (root / "loop").mkdir(parents=True)
    (root / "loop" / "again").symlink_to(root)
    (root / "loop" / "config.json").symlink_to(root / "loop" / "config.json")
    make_checkpoint(root / "good", "llama")
    library = ModelLibrary((root,), offline=True)
    assert "good" in ids(library)
    assert isinstance(library.broken[ModelId("loop")], ExoNodeError)
