"""The local verifier: which forwards it makes of what it is asked."""

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import KVCache

from exo_node.mtp.seams import Want, as_row
from exo_node.shard.local import WholeTarget

V = 8


class Counting(nn.Module):
    """A model that notes how many rows each forward had."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self.forwards: list[int] = []

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        self.forwards.append(ids.shape[1])
        return mx.zeros((1, ids.shape[1], V))


@pytest.mark.parametrize(
    ("want", "forwards"),
    [("none", [64]), ("last", [63, 1]), ("all", [64])],
)
def test_a_chunk_is_read_in_one_forward_unless_its_last_row_alone_has_logits(
    want: Want, forwards: list[int]
) -> None:
    model = Counting()
    block = WholeTarget(model).forward(as_row([1] * 64), [KVCache()], want=want)
    assert model.forwards == forwards
    assert block.logits.shape[0] == {"none": 0, "last": 1, "all": 64}[want]
