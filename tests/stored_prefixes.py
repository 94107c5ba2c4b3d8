"""Engines with prefixes on disk, and the files that they leave."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from engines import answer, engine_of, request
from prefixes import CHUNK, ROOM, TOKENS, cold, comparable, hybrid
from small import small_spec

from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.prefixes.disk import PrefixDisk

MIB = 1 << 20


class SavesPrefixes(Protocol):
    """An engine or a stage."""

    def save_prefix(self) -> bool: ...


def opened(folder: Path, budget: int = 64 * MIB, key: str = "this model") -> PrefixDisk:
    return PrefixDisk(folder, key, budget, hybrid().model.make_caches)


def engine(disk: PrefixDisk) -> TextEngine:
    stage_spec = small_spec(native_mtp=True, prefill_chunk=CHUNK, prefix_cache_bytes=ROOM)
    return engine_of(hybrid(), stage_spec, prefix_disk=disk)


def settle(*engines: SavesPrefixes) -> None:
    """Idle time that is long enough for all files."""
    for each in engines:
        while each.save_prefix():
            time.sleep(0.001)


def cached_tokens(disk: PrefixDisk, prompt: Sequence[int], k: int, **fields: Any) -> int:
    """Tokens that a new process did not read. Its answer is the cold one."""
    new_engine = engine(disk)
    got = answer(new_engine, request(prompt, k, TOKENS, **fields))
    assert comparable(got) == cold(prompt, k)
    settle(new_engine)
    return got.stats.cached_tokens


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
