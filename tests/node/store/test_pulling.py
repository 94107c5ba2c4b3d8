"""The repository and revision that a pull downloads, and the models that may be deleted."""

from pathlib import Path

import pytest
from huggingface_hub import constants
from models import make_checkpoint

from exo_node.node.store.library import KnownModel, ModelLibrary
from exo_node.placement.errors import ModelNotFound
from exo_node.placement.ids import ModelId
from exo_node.placement.library import packaged_cards

MODEL = "Qwen/Qwen3.6-27B"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("", (MODEL, None)),
        ('revision = "v1.2"', (MODEL, "v1.2")),
        ('repository = "me/mine"\nrevision = "v1.2"', ("me/mine", "v1.2")),
    ],
)
def test_a_pull_is_of_the_repository_and_the_revision_that_the_card_names(
    tmp_path: Path, fields: str, expected: tuple[str, str | None]
) -> None:
    assert MODEL in packaged_cards()
    _ = (tmp_path / "card.toml").write_text(f'id = "{MODEL}"\n{fields}\n')
    library = ModelLibrary((), offline=True, cards=tmp_path)
    assert library.repository(MODEL) == expected


def test_a_model_is_deleted_by_its_own_id_where_its_card_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    fields = 'repository = "me/mine"\nrevision = "v1.2"'
    _ = (tmp_path / "card.toml").write_text(f'id = "{MODEL}"\n{fields}\n')
    folder = tmp_path / "hub" / "models--me--mine"
    snapshot = make_checkpoint(folder / "snapshots" / ("c" * 40), "llama")
    (folder / "refs").mkdir()
    _ = (folder / "refs" / "v1.2").write_text(snapshot.name)
    library = ModelLibrary((), offline=True, cards=tmp_path)
    library.removal(MODEL, tmp_path / "models").carry_out()
    assert not folder.exists()
    with pytest.raises(ModelNotFound, match="nothing to delete"):
        _ = library.removal(MODEL, tmp_path / "models")


def test_only_models_on_the_disk_are_named_for_a_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    library = ModelLibrary((tmp_path / "mine",), offline=True)
    near = "Qwen/Qwen3.6-27"
    with pytest.raises(ModelNotFound, match=r"Did you mean Qwen/Qwen3\.6-27B"):
        _ = library.get(ModelId(near))
    with pytest.raises(ModelNotFound) as nothing:
        _ = library.removal(near, tmp_path / "models")
    assert "Did you mean" not in nothing.value.message and "pull" not in nothing.value.message
    with pytest.raises(ModelNotFound) as demo:
        _ = library.removal("demoo", tmp_path / "models")
    assert "Did you mean" not in demo.value.message, "it is never deleted"
    folder = tmp_path / "hub" / "models--me--Qwen3.6-mine"
    _ = make_checkpoint(folder / "snapshots" / ("c" * 40), "llama")
    (folder / "refs").mkdir()
    _ = (folder / "refs" / "main").write_text("c" * 40)
    with pytest.raises(ModelNotFound, match=r"Did you mean me/Qwen3\.6-mine\? `exo-node models`"):
        _ = library.removal(near, tmp_path / "models")


def test_a_repository_without_a_card_is_pulled_as_it_is_named(tmp_path: Path) -> None:
    library = ModelLibrary((), offline=True, cards=tmp_path)
    assert library.repository("nobody/knows") == ("nobody/knows", None)


def test_each_place_says_whether_its_models_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    library = ModelLibrary((tmp_path / "mine", tmp_path / "data"), offline=True)
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)

    def reason_of(folder: Path | None) -> str:
        return library.kept_reason(KnownModel(packaged_cards()[ModelId(MODEL)], folder))

    assert reason_of(tmp_path / "mine" / "m") == f"{tmp_path / 'mine' / 'm'} is a folder of yours"
    assert reason_of(snapshot) == "another program brought it"
    assert reason_of(tmp_path / "data" / "m") == reason_of(None) == ""
    demo = packaged_cards()[ModelId("demo")]
    assert library.kept_reason(KnownModel(demo, None)) == "it is part of exo-node"
