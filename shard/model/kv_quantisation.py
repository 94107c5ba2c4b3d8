"""Attention's caches in 4 or 8 bits a number, by mlx-lm's quantised cache.

Each row is quantised by itself, so rollback works as with a plain cache, and a block of rows writes
the same as single steps. Answers differ a little from those without quantisation, so comparisons
bit for bit always have it on both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache


@dataclass(frozen=True, slots=True)
class KvQuantisation:
    """How keys and values are quantised."""

    bits: int
    group_size: int
    """Numbers that share a scale and a bias."""


def quantised(caches: Sequence[object], kv: KvQuantisation) -> list[Any]:
    """A fresh cache list in which the plain entries are quantised ones."""
    return [QuantizedKVCache(kv.group_size, kv.bits) if type(c) is KVCache else c for c in caches]


def unquantised(caches: Sequence[object]) -> list[str]:
    """Names of the cache classes that grow with the context and are not quantised."""
    kinds = {type(c) for c in caches if not isinstance(c, QuantizedKVCache | ArraysCache)}
    return sorted(kind.__name__ for kind in kinds)
