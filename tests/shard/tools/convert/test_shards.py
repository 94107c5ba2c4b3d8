"""The files of a quantised copy."""

import fcntl
import itertools
import os
from pathlib import Path

import pytest
from models import make_checkpoint

from exo_node.placement.errors import InvalidCheckpoint
from exo_node.shard.checkpoint.checkpoint import read_checkpoint
from exo_node.shard.tools.convert.main import convert
from exo_node.shard.tools.convert.shards import new_folder


def ignore(_: int, __: int) -> None:
    pass


@pytest.mark.parametrize("shard_bytes", [20_000, 40_000, 1 << 30])
def test_a_file_of_a_copy_is_full_before_the_next_one_begins(
    shard_bytes: int, tmp_path: Path
) -> None:
    source = read_checkpoint(make_checkpoint(tmp_path / "raw", "llama"))
    target = tmp_path / "4bit"
    target.mkdir()
    convert(source, target, 4, ignore, shard_bytes=shard_bytes)
    tensors = sorted(read_checkpoint(target).tensors.values(), key=lambda t: t.file)
    sizes = [
        [tensor.nbytes for tensor in group]
        for _, group in itertools.groupby(tensors, key=lambda tensor: tensor.file)
    ]
    assert all(sum(size) <= shard_bytes or len(size) == 1 for size in sizes)
    for one, other in itertools.pairwise(sizes):
        assert sum(one) + max(other) > shard_bytes


def test_a_new_folder_deletes_what_a_killed_command_left_and_nothing_else(tmp_path: Path) -> None:
    abandoned, busy = tmp_path / ".old.exo-part", tmp_path / ".busy.exo-part"
    for folder in (abandoned, busy, tmp_path / ".mine.part"):
        folder.mkdir()
        _ = (folder / "weights").write_text("x")
    descriptor = os.open(busy, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with new_folder(tmp_path / "new") as folder:
        _ = (folder / "weights").write_text("y")
        with pytest.raises(InvalidCheckpoint, match="another command"):
            new_folder(tmp_path / "new").__enter__()
    with pytest.raises(InvalidCheckpoint, match="another command"):
        new_folder(tmp_path / "busy").__enter__()
    os.close(descriptor)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"new", ".busy.exo-part", ".mine.part"}
    with pytest.raises(InvalidCheckpoint, match="there already"):
        new_folder(tmp_path / "new").__enter__()


def test_an_error_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), new_folder(tmp_path / "new") as folder:
        _ = (folder / "weights").write_text("y")
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []
