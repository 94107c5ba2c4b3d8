"""A table of embeddings that stays on disk: a forward reads the rows that it needs.

Qwen3.8-Flash-Next has 320 million rows of 160 numbers and reads 16 of them for a token. mlx-vlm
does so by a manifest beside the checkpoint, for two ways to quantise. Here the tensors are read
where the checkpoint has them, in any form that MLX packs.
"""

import mmap
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple, cast

import mlx.core as mx
from mlx import nn

_NGRAM: Final = re.compile(r"\.ngram_embedding\.shards?[._](\d+)\.")
_PREFIXES: Final = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
_DTYPES: Final = {
    "U32": mx.uint32,
    "U8": mx.uint8,
    "F8_E4M3": mx.uint8,
    "BF16": mx.bfloat16,
    "F16": mx.float16,
    "F32": mx.float32,
}
_BLOCK_MODES: Final = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
"""MLX's names of bits and group sizes without biases."""


class StoredRows(NamedTuple):
    """A tensor (rows, width) in a file."""

    file: Path
    start: int
    """Bytes before it."""
    dtype: str
    """Its name in safetensors."""
    shape: tuple[int, ...]


class _Mapped:
    """A tensor's rows in a mapped file."""

    def __init__(self, place: StoredRows) -> None:
        if place.dtype not in _DTYPES or len(place.shape) != 2:
            raise ValueError(f"a table of {place.dtype} {list(place.shape)} is not read by rows")
        with place.file.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes.madvise(mmap.MADV_RANDOM)
        self._start, self.dtype = place.start, _DTYPES[place.dtype]
        self.rows, self.width = place.shape
        self._stride = self.width * self.dtype.size

    def row(self, index: int) -> bytes:
        at = self._start + index * self._stride
        return self._bytes[at : at + self._stride]


class RowTable(nn.Module):
    """The rows of several tensors, one after the other, as mlx-vlm's `ShardedEmbedding` has them.

    Empty until `fill`. It has no parameters, so a load of the model reads none of it.
    """

    def __init__(self, shards: Sequence[int], dims: int) -> None:
        """`shards`: the rows of each tensor; `dims`: numbers of a row."""
        super().__init__()
        self._shards, self._dims = tuple(shards), dims
        self._first = (0, *accumulate(shards))
        self._parts: dict[str, list[_Mapped]] = {}
        self.dtype: mx.Dtype | None = None
        """That of the rows, or None for the checkpoint's."""
        self._scale: mx.array | None = None

    @property
    def shards(self) -> int:
        """The number of tensors."""
        return len(self._shards)

    def fill(self, parts: Sequence[dict[str, StoredRows]], scale: mx.array | None) -> None:
        """Maps the files; `parts`: by tensor, its `weight`, and `scales` and `biases` if it is
        quantised. `scale`: of rows in FP8. Raises ValueError for shapes that do not fit."""
        tables = [{part: _Mapped(place) for part, place in each.items()} for each in parts]
        if tuple(each["weight"].rows for each in tables) != self._shards:
            raise ValueError("the n-gram tables have other rows than config.json says")
        names = tables[0].keys()
        self._parts = {name: [each[name] for each in tables] for name in names}
        width = self._parts["weight"][0].width
        if "scales" not in names and width != self._dims:
            raise ValueError(f"the n-gram tables are {width} wide, not {self._dims}")
        in_fp8 = "scales" not in names and self._parts["weight"][0].dtype == mx.uint8
        if in_fp8 != (scale is not None):
            raise ValueError("the n-gram tables have a scale exactly if they are in FP8")
        self._scale = scale

    def __call__(self, ids: mx.array) -> mx.array:
        """(…) rows' indices -> (…, dims); waits for the indices."""
        places = list[tuple[int, int]]()
        for index in cast("list[int]", ids.flatten().tolist()):
            if not 0 <= index < self._first[-1]:
                raise IndexError(f"the n-gram tables have no row {index}")
            shard = bisect_right(self._first, index) - 1
            places.append((shard, index - self._first[shard]))
        rows = {name: _gathered(parts, places) for name, parts in self._parts.items()}
        return self._numbers(**rows).reshape(*ids.shape, self._dims)

    def _numbers(
        self, weight: mx.array, scales: mx.array | None = None, biases: mx.array | None = None
    ) -> mx.array:
        if self._scale is not None:
            weight = mx.from_fp8(weight, dtype=mx.bfloat16) * self._scale
        if scales is None:
            return weight if self.dtype is None else weight.astype(self.dtype)
        bits, group = 32 * weight.shape[1] // self._dims, self._dims // scales.shape[1]
        if biases is None:
            rows = mx.dequantize(
                weight, scales, group_size=group, bits=bits, mode=_BLOCK_MODES[bits, group]
            )
            return rows if self.dtype is None else rows.astype(self.dtype)
        if self.dtype is not None:
            scales, biases = scales.astype(self.dtype), biases.astype(self.dtype)
        return mx.dequantize(weight, scales, biases, group_size=group, bits=bits)


def _gathered(parts: Sequence[_Mapped], places: Sequence[tuple[int, int]]) -> mx.array:
    data = b"".join(parts[shard].row(row) for shard, row in places)
    rows = mx.array(cast("mx.array", memoryview(data))).reshape(len(places), -1)
    return rows.view(parts[0].dtype)


def ours_of(name: str) -> str:
    """A checkpoint's name of a tensor as the model's."""
    for theirs, ours in _PREFIXES:
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    return _NGRAM.sub(r".ngram_embedding.shards.\1.", name)
