"""Searches of a hub on loopback."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import MODEL, REPOSITORY, FakeHub, serve
from models import make_checkpoint

from exo_node.node.store.hub_search import Hit, HubSearch
from exo_node.node.store.stop_signal import StopSignal
from exo_node.placement.errors import DownloadFailed
from exo_node.shard.checkpoint.checkpoint import MAX_CONFIG_BYTES


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = make_checkpoint(tmp_path / "source", "qwen3_5", hidden=64)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub = FakeHub({**files, "README.md": b"# not counted", "pytorch_model.bin": b"pickle"})
    with serve(hub):
        yield hub


def find(search: HubSearch, query: str, within_s: float = 60.0) -> list[Hit]:
    return search.find(query, 10, StopSignal(), within_s)


def test_a_hit_has_the_bytes_of_a_download_and_its_config(hub: FakeHub) -> None:
    [hit] = find(HubSearch(hub.url), "tiny")
    config = hub.files["config.json"]
    assert (hit.repository, hit.downloads, hit.likes, hit.gated) == (REPOSITORY, 1234, 5, False)
    assert hit.updated == "2026-11-01T10:00:00.000Z"
    assert hit.contents.weight_bytes == len(hub.files[MODEL])
    assert hit.contents.download_bytes == len(hub.files[MODEL]) + len(config)
    assert hit.contents.config == json.loads(config)
    assert hub.searched == ["tiny"]
    assert hub.fetched() == {"config.json"}


def test_a_commit_that_was_seen_is_not_read_again(hub: FakeHub) -> None:
    search = HubSearch(hub.url)
    first = find(search, "tiny")
    before = len(hub.requests)
    assert find(search, "TINY") == first
    assert len(hub.requests) == before and hub.searched == ["tiny", "TINY"]


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"model.gguf": b"x", "config.json": b"{}"}, "GGUF and .bin files are not read"),
        ({MODEL: b"x", "config.json": b'{"model_type": "never"}'}, "no class for model_type"),
        ({MODEL: b"x", "config.json": b"[1"}, "config.json"),
        ({MODEL: b"x", "config.json": b'{"model_file": "m.py"}'}, "names code to run"),
        (
            {MODEL: b"x", "config.json": b" " * (MAX_CONFIG_BYTES + 1)},
            "config.json has the wrong form",
        ),
    ],
)
def test_a_repository_that_cannot_be_used_says_why_and_hides_no_other(
    hub: FakeHub, files: dict[str, bytes], fault: str
) -> None:
    hub.others["owner/other"] = files
    hits = {str(hit.repository): hit.contents for hit in find(HubSearch(hub.url), "owner")}
    assert hits[REPOSITORY].fault == "" and hits[REPOSITORY].config
    assert fault in hits["owner/other"].fault and hits["owner/other"].config is None


def test_a_gated_repository_says_so_and_is_asked_again_next_time(hub: FakeHub) -> None:
    search = HubSearch(hub.url)
    hub.refuse = (403, "GatedRepo")
    [hit] = find(search, "tiny")
    assert "Accept its terms" in hit.contents.fault
    hub.refuse = None
    assert find(search, "tiny")[0].contents.fault == ""


def test_a_hub_that_is_gone_is_named() -> None:
    with pytest.raises(DownloadFailed, match=r"could not be searched.*Check the network"):
        _ = find(HubSearch("http://127.0.0.1:9"), "tiny")
