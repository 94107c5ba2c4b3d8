"""Partial copies on a node's own disk, and a disk that cannot be written."""

import asyncio
from pathlib import Path

import pytest
from copying import MODEL, WHOLE, Taker, giver, giving, silent, taking, watch
from permissions import permissions_hold

from exo_node.node.store.copy_folder import CopyFolder
from exo_node.node.store.listing import on_disk
from exo_node.node.store.model_folder import COPY_FILE
from exo_node.placement.cluster import ClusterView
from exo_node.placement.errors import DownloadFailed, ModelNotFound
from exo_node.proto import peer_pb2 as pb


async def test_a_partial_copy_is_listed_with_its_size_and_deleted(tmp_path: Path) -> None:
    one, two = giver(tmp_path, rows=20_000), Taker(tmp_path / "two")
    read = watch(one)
    async with giving(one) as source, taking(two, source) as fetcher:
        read[0].chunks = 2
        with pytest.raises(ModelNotFound):
            _ = await fetcher.fetch(WHOLE, silent)
    size = sum(p.stat().st_size for p in (two.models / MODEL).rglob("*") if p.is_file())
    entry = {each["id"]: each for each in on_disk(two.library, ClusterView(()))}[MODEL]
    assert (entry["partial_bytes"], entry["downloaded"]) == (size, False) and size > 2 << 20
    assert f"`exo-node models rm {MODEL}`" in entry["error"]
    removal = two.library.removal(MODEL, two.models, only_own=True)
    assert removal.freed_bytes == size
    removal.carry_out()
    assert not (two.models / MODEL).exists()
    assert MODEL not in {each["id"] for each in on_disk(two.library, ClusterView(()))}
    with pytest.raises(ModelNotFound):
        _ = two.library.removal(MODEL, two.models)


def test_a_folder_that_cannot_be_written_is_named_and_mended_takes_the_copy(tmp_path: Path) -> None:
    one, two = giver(tmp_path), Taker(tmp_path / "two")
    two.models.mkdir(parents=True)

    async def run() -> None:
        async with giving(one) as source, taking(two, source) as fetcher:
            two.models.chmod(0o555)
            with pytest.raises(DownloadFailed) as caught:
                _ = await fetcher.fetch(WHOLE, silent)
            message = caught.value.message
            assert f"{MODEL} could not be written to {two.models} (Permission denied)" in message
            assert "mend the permissions there, and load it again" in message
            two.models.chmod(0o755)
            _ = await fetcher.fetch(WHOLE, silent)

    with permissions_hold():
        asyncio.run(run())


async def test_a_whole_copy_that_lost_its_config_is_partial_and_copied_again(
    tmp_path: Path,
) -> None:
    one, two = giver(tmp_path), Taker(tmp_path / "two")
    async with giving(one) as source, taking(two, source) as fetcher:
        folder = (await fetcher.fetch(WHOLE, silent)).folder
        (folder / "config.json").unlink()
        library = two.library
        assert MODEL not in {*library.scan(), *library.broken} and MODEL in library.partial
        _ = await fetcher.fetch(WHOLE, silent)
        assert MODEL in library.scan() and not library.partial


def test_a_copy_of_another_revision_leaves_what_was_put_beside_the_former_one(
    tmp_path: Path,
) -> None:
    folder = CopyFolder(tmp_path / "copy")
    folder.begin("m", pb.ModelOffer(fingerprint="1"))
    (mine := tmp_path / "mine").mkdir()
    names = ("model.safetensors", "config.json", "model-2.safetensors.incomplete")
    for path in (*map(folder.path.joinpath, (*names, "notes.md")), mine / "config.json"):
        _ = path.write_text("x")
    (folder.path / "link").symlink_to(mine)
    folder.begin("m", pb.ModelOffer(fingerprint="2"))
    assert {each.name for each in folder.path.iterdir()} == {COPY_FILE, "notes.md", "link"}
    assert (mine / "config.json").exists()
