"""The files of a quantised copy."""

import itertools
from pathlib import Path

import pytest
from models import make_checkpoint

from exo_node.shard.checkpoint.checkpoint import read_checkpoint
from exo_node.shard.tools.convert.convert import convert


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
