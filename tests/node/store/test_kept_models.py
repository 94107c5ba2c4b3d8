"""Models that the page never deletes say why, so that it offers no button for it."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from exo_node.node.store.library import KnownModel, ModelLibrary
from exo_node.placement.ids import ModelId
from exo_node.placement.library import packaged_cards

CARD = next(card for id, card in packaged_cards().items() if id != ModelId("demo"))


def test_each_place_says_whether_its_models_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    library = ModelLibrary((tmp_path / "mine", tmp_path / "data"), offline=True)
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)

    def kept(folder: Path | None) -> str:
        return library.kept_reason(KnownModel(CARD, folder))

    assert kept(tmp_path / "mine" / "m") == f"{tmp_path / 'mine' / 'm'} is a folder of yours"
    assert kept(snapshot) == "another program brought it"
    assert kept(tmp_path / "data" / "m") == kept(None) == ""
    demo = packaged_cards()[ModelId("demo")]
    assert library.kept_reason(KnownModel(demo, None)) == "it is part of exo-node"
