"""Repositories of the hub whose listings are an attack."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import REPOSITORY, FakeHub, serve
from models import make_checkpoint

from exo_node.node.store.hub_cache import HubCache
from exo_node.node.store.hub_download import download
from exo_node.placement.errors import DownloadFailed


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = make_checkpoint(tmp_path / "source", "qwen3_5", hidden=128)
    hub = FakeHub({path.name: path.read_bytes() for path in folder.iterdir()})
    with serve(hub):
        yield hub


def get(hub: FakeHub, cache: Path) -> Path:
    return download(
        REPOSITORY, None, lambda _: None, offline=False, endpoint=hub.url, cache=HubCache(cache)
    )


def test_names_that_lead_out_of_the_folder_are_neither_fetched_nor_written(
    hub: FakeHub, tmp_path: Path
) -> None:
    sound = {*hub.files}
    for name in ("../model-a.safetensors", "/model-b.safetensors", "a/../../model-c.safetensors"):
        hub.files[name] = b"out"
    hub.files["weights.pkl"] = b"\x80"
    snapshot = get(hub, tmp_path / "cache")
    assert {path.name for path in snapshot.iterdir()} == hub.fetched() == sound
    assert not [path for path in tmp_path.rglob("*model-*") if "cache" not in path.parts]


def test_a_repository_of_countless_files_is_refused_before_any_is_fetched(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.files |= {f"{number}.json": b"{}" for number in range(2001)}
    with pytest.raises(DownloadFailed, match="too many files for a model"):
        _ = get(hub, tmp_path / "cache")
    assert hub.requests == []
    assert not [*(tmp_path / "cache").rglob("*.json")]


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.pkl", "model.pt"])
def test_a_repository_of_pickles_alone_is_refused_before_any_is_fetched(
    hub: FakeHub, tmp_path: Path, weights: str
) -> None:
    hub.files = {"config.json": b"{}", weights: b"\x80"}
    with pytest.raises(DownloadFailed, match="Choose a repository in safetensors format"):
        _ = get(hub, tmp_path / "cache")
    assert hub.requests == []
