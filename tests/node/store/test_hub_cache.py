"""Removing one of several revisions from the Hugging Face cache."""

from pathlib import Path

from hub import REPOSITORY

from exo_node.node.store.hub_cache import HubCache
from exo_node.node.store.places import Removal
from exo_node.placement.ids import ModelId

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
    old = add_revision(tmp_path, "1", {**shared, "model.safetensors": "old"})
    new = add_revision(tmp_path, "2", {**shared, "model.safetensors": "new"})
    refs = tmp_path / "models--owner--tiny" / "refs"
    refs.mkdir()
    _ = (refs / "main").write_text("2")
    _ = (refs / "v1").write_text("1")
    removal = Removal(
        ModelId(REPOSITORY), HubCache(tmp_path).paths_of(REPOSITORY, old), 8, own=True
    )
    removal.carry_out()
    assert not old.exists()
    assert {path.name for path in (old.parents[1] / "blobs").iterdir()} == {"c", "h", "new"}
    assert all((new / file).exists() for file in (*shared, "model.safetensors"))
    assert [path.name for path in refs.iterdir()] == ["main"]
