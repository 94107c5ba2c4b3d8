"""Arrays on the wire: the same bits come back, in every dtype and from every layout."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from exo_node.shard.model.tensors import DTYPES, ITEM_BYTES, WIRE, from_bytes, to_bytes

LAYOUTS: dict[str, Callable[[mx.array], mx.array]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.swapaxes(1, 2),
    "reversed": lambda x: x[:, ::-1],
    "a row of a chunk": lambda x: x[:, -1:],
    "broadcast": lambda x: mx.broadcast_to(x[:1, :1], (1, 3, 8)),
}


def noise(dtype: str) -> mx.array:
    return mx.random.normal((1, 6, 8), key=mx.random.key(3)).astype(DTYPES[dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_the_same_bits_come_back(dtype: str, layout: str) -> None:
    array = LAYOUTS[layout](noise(dtype))
    data = to_bytes(array)
    assert len(data) == array.size * ITEM_BYTES[dtype]
    back = from_bytes(data, dtype, array.shape)
    assert back.dtype == DTYPES[dtype]
    assert mx.array_equal(back, array)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_nan_infinity_and_negative_zero_survive(dtype: str) -> None:
    array = mx.array([float("nan"), float("inf"), -float("inf"), -0.0]).astype(DTYPES[dtype])
    data = to_bytes(array)
    assert to_bytes(from_bytes(data, dtype, (4,))) == data


def test_the_bytes_are_little_endian_and_row_major() -> None:
    assert to_bytes(mx.array([[1.0, 2.0], [-0.0, 0.5]])).hex() == (
        "0000803f0000004000000080" + "0000003f"
    )
    assert to_bytes(mx.array([1.0]).astype(mx.bfloat16)).hex() == "803f"
    assert to_bytes(mx.array([1.0]).astype(mx.float16)).hex() == "003c"


def test_every_dtype_has_a_number_and_a_size() -> None:
    assert DTYPES.keys() == WIRE.keys() == ITEM_BYTES.keys()
    assert len({*WIRE.values()}) == 3 and 0 not in WIRE.values()
    for name, dtype in DTYPES.items():
        assert dtype.size == ITEM_BYTES[name]
