"""Removing one of several revisions from the Hugging Face cache, and whose downloads they are."""

import json
from pathlib import Path

import pytest
from hub import REPOSITORY

from exo_node.node.store.hub_cache import HubCache, is_own, paths_of, progress
from exo_node.node.store.identifiers import Commit, FilePath, Revision, Sha256
from exo_node.node.store.places import Removal
from exo_node.node.store.transfers import RemoteFile
from exo_node.placement.ids import ModelId

ONE, TWO = Commit("1" * 40), Commit("2" * 40)
SHARED_HEAD = "mtp/weights.safetensors"


def add_revision(cache: Path, commit: str, blobs: dict[str, str]) -> Path:
    """A snapshot as the hub's client lays it out. `blobs`: the blob's name by the file's path."""
    repository = cache / "models--owner--tiny"
    snapshot = repository / "snapshots" / commit
    for file, blob in blobs.items():
        target, link = repository / "blobs" / blob, snapshot / file
        for path in (target, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        _ = target.write_bytes(b"12345678")
        link.symlink_to(target)
    return snapshot


def test_removing_a_revision_deletes_the_files_that_no_other_revision_has(tmp_path: Path) -> None:
    """Files in subfolders count, too."""
    shared = {"config.json": "c", SHARED_HEAD: "h"}
    old = add_revision(tmp_path, ONE, {**shared, "model.safetensors": "old"})
    new = add_revision(tmp_path, TWO, {**shared, "model.safetensors": "new"})
    refs = tmp_path / "models--owner--tiny" / "refs"
    refs.mkdir()
    _ = (refs / "main").write_text(TWO)
    _ = (refs / "v1").write_text(ONE)
    removal = Removal(ModelId(REPOSITORY), paths_of(old), 8, own=True)
    removal.carry_out()
    assert not old.exists()
    assert {path.name for path in (old.parents[1] / "blobs").iterdir()} == {"c", "h", "new"}
    assert all((new / file).exists() for file in (*shared, "model.safetensors"))
    assert [path.name for path in refs.iterdir()] == ["main"]


def test_removing_a_revision_leaves_files_elsewhere_to_which_links_lead(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("lora.safetensors", "big"):
        _ = (mine / name).write_text("mine")
    old = add_revision(tmp_path, ONE, {"config.json": "c", "model.safetensors": "big"})
    _ = add_revision(tmp_path, TWO, {"config.json": "c"})
    (old / "lora.safetensors").symlink_to(mine / "lora.safetensors")
    blob = old.parents[1] / "blobs" / "big"  # moved to another disk by hand
    blob.unlink()
    blob.symlink_to(mine / "big")
    paths = paths_of(old)
    Removal(ModelId(REPOSITORY), paths, 8, own=True).carry_out()
    assert not old.exists() and len([*mine.iterdir()]) == 2


SHA = {name: Sha256(name * 64) for name in "ab"}


def claimed(cache: HubCache, commit: Commit, sha256: Sha256) -> None:
    files = [
        RemoteFile(FilePath("config.json"), 8, None),
        RemoteFile(FilePath("model.safetensors"), 8, sha256),
    ]
    cache.claim(REPOSITORY, Revision(f"v{commit[0]}"), commit, files)


def test_removing_a_revision_leaves_the_partial_files_of_others(tmp_path: Path) -> None:
    cache = HubCache(tmp_path)
    for commit, sha in ((ONE, SHA["a"]), (TWO, SHA["b"])):
        claimed(cache, commit, sha)
        _ = add_revision(tmp_path, commit, {"config.json": "c"})
    blobs = cache.repository(REPOSITORY) / "blobs"
    for sha in SHA.values():
        _ = (blobs / f"{sha}.incomplete").write_bytes(b"1234")
    old = blobs.parent / "snapshots" / ONE
    assert progress(old) == (12, 16)
    Removal(ModelId(REPOSITORY), paths_of(old), 8, own=True).carry_out()
    assert {path.name for path in blobs.iterdir()} == {"c", f"{SHA['b']}.incomplete"}
    assert is_own(old.with_name(str(TWO))) and not is_own(old)


def test_a_snapshot_that_was_there_before_is_not_exo_nodes(tmp_path: Path) -> None:
    cache = HubCache(tmp_path)
    snapshot = add_revision(tmp_path, ONE, {"config.json": "c"})
    claimed(cache, ONE, SHA["a"])
    assert not is_own(snapshot)


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"[]",
        b"{}",
        b'{"own": true}',
        b'{"own": "yes", "files": {}}',
        b'{"own": true, "files": {"m": 1}}',
        json.dumps({"own": True, "files": {"m": [8, "../../../victim"]}}).encode(),
    ],
)
def test_a_damaged_record_claims_nothing(tmp_path: Path, record: bytes) -> None:
    cache = HubCache(tmp_path)
    claimed(cache, ONE, SHA["a"])
    snapshot = add_revision(tmp_path, ONE, {"config.json": "c"})
    assert is_own(snapshot)
    _ = (cache.repository(REPOSITORY) / ".exo-node" / ONE).write_bytes(record)
    assert not is_own(snapshot)
    assert progress(snapshot) == (8, 8)
