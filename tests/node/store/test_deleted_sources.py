"""A model that its node deletes while a peer copies it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from copying import MODEL, SECOND, WHOLE, Taker, giver, giving, silent, taking, watch

from exo_node.node.store.transfers import Progress
from exo_node.placement.errors import ModelNotFound
from exo_node.shard.checkpoint.checkpoint import read_checkpoint

ROWS = 20_000
"""So that a weight file is sent in several chunks."""


def deleting(folder: Path) -> Callable[[str, Progress], None]:
    """A report of progress that deletes the source's folder amid the second weight file."""

    def report(step: str, news: Progress) -> None:
        file = news.files[SECOND]
        if 0 < file.done_bytes < file.total_bytes and folder.exists():
            shutil.rmtree(folder)

    return report


async def test_a_deletion_amid_a_copy_ends_it_with_its_reason_and_shows_no_half_model(
    tmp_path: Path,
) -> None:
    one, two = giver(tmp_path, rows=ROWS), Taker(tmp_path / "two")
    folder = one.root / "models" / MODEL
    saved = shutil.copytree(folder, tmp_path / "saved")
    async with giving(one) as source, taking(two, source) as fetcher:
        with pytest.raises(ModelNotFound, match=r"one: .* cannot be read \(No such file"):
            _ = await fetcher.fetch(WHOLE, deleting(folder))
        assert not folder.exists()
        library = two.library
        assert MODEL not in library.scan() and MODEL not in library.broken
        assert MODEL in library.partial
        _ = shutil.copytree(saved, folder)
        copy = await fetcher.fetch(WHOLE, silent)
    for path in saved.iterdir():
        assert (copy.folder / path.name).read_bytes() == path.read_bytes()


async def test_another_peer_gives_the_rest_of_a_model_that_the_first_deletes(
    tmp_path: Path,
) -> None:
    one, two = giver(tmp_path, rows=ROWS), Taker(tmp_path / "two")
    third = giver(tmp_path, "third", rows=ROWS)
    read = watch(third)
    folder = one.root / "models" / MODEL
    async with (
        giving(one) as first,
        giving(third, "third") as other,
        taking(two, first, other) as fetcher,
    ):
        copy = await fetcher.fetch(WHOLE, deleting(folder))
    assert copy.fingerprint == read_checkpoint(third.root / "models" / MODEL).fingerprint
    assert SECOND not in [path for path, _ in read[0].reads]  # it arrived before the deletion
    assert len(two.events_of("peer_left")) == 1
