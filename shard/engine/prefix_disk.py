"""Prefixes on disk: the state behind a prompt's first turn, for the next process.

Each prefix is a file, in a folder whose name stands for everything that decides its bits. A file
that was changed since it was written is deleted and not used. Files reveal prompts, as the caches
of a running model do: they are readable by the node's user only, and nothing is written unless
EXO_PREFIX_CACHE_DISK is set.
"""

import contextlib
import hashlib
import json
import logging
import os
import stat
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from ...mtp.rollback import TapedCache, cache_arrays
from ..checkpoint.files import write_atomic
from .cache_parts import DraftPrefix, LayerRows, has_rows, joined, rows_of
from .prefix_cache import Prefix
from .prefix_tree import Salt, mark_of

log = logging.getLogger(__name__)

FORMAT: Final = "3"
"""Version of the file format; older files are ignored."""
MIN_ROWS: Final = 256
"""A shorter first turn is computed as fast as a file is read."""
_SUFFIX: Final = ".safetensors"
_DRAFTER: Final = "drafter"
_HIDDEN: Final = "drafter.hidden"
_KINDS: Final = (KVCache, QuantizedKVCache, RotatingKVCache, ArraysCache, TapedCache)
"""Caches whose state consists of numbers and arrays, unlike a list of caches."""


class PrefixDisk:
    """Prefixes on disk. All methods run on the compute thread; another thread writes the files."""

    def __init__(
        self, root: Path, key: str, budget: int, make_caches: Callable[[], list[Any]]
    ) -> None:
        """`key`: everything but the ids that decides a prefix's bits. `budget`: bytes of all files
        below `root`. `make_caches` makes the empty caches of one request.
        """
        self._root = root
        self._folder = root / hashlib.sha256(f"{FORMAT} {key}".encode()).hexdigest()[:32]
        self._budget = budget
        self._make_caches = make_caches
        self._names = {path.stem for path in self._folder.glob(f"*{_SUFFIX}")}
        self._writer = ThreadPoolExecutor(1, "prefix-disk")
        self._writing: Future[None] | None = None
        self._off = False

    def find(
        self,
        prompt: Sequence[int],
        ends: Sequence[int],
        beyond: int,
        salt: Salt = b"",
        *,
        drafts: bool,
    ) -> Prefix | None:
        """The longest prefix of more than `beyond` rows; see also `PrefixCache.find`."""
        if not self._names:
            return None
        stored = [
            (end, name) for end, name in _names(prompt, ends[:-1], salt) if name in self._names
        ]
        for end, name in reversed(stored):
            if end <= beyond:
                break
            prefix = self._read(name, end)
            if prefix is not None and (prefix.drafter is not None or not drafts):
                return prefix
        return None

    def keep(
        self,
        prompt: Sequence[int],
        ends: Sequence[int],
        rows: int,
        caches: Sequence[Any],
        drafter: DraftPrefix | None,
        turn_ends: frozenset[int],
        salt: Salt = b"",
    ) -> None:
        """Writes the state behind the prompt's first turn, unless there is a file of it already.

        Parameters as in `PrefixCache.keep`. Does nothing while another file is being written.
        """
        first_turn = next((end for end in ends if prompt[end - 1] in turn_ends), 0)
        if rows != first_turn or rows < MIN_ROWS or self._off:
            return
        if self._writing is not None and not self._writing.done():
            return
        if any(type(cache) not in _KINDS for cache in caches):
            return
        (*_, (_, name)) = _names(prompt, [end for end in ends if end <= rows], salt)
        path = self._folder / f"{name}{_SUFFIX}"
        if name in self._names and (drafter is None or _has_drafter(path)):
            return
        tensors, metadata = _described(caches, drafter, rows)
        if sum(each.nbytes for each in tensors.values()) > self._budget:
            return
        mx.eval(list(tensors.values()))
        self._writing = self._writer.submit(self._write, path, tensors, metadata)
        self._names.add(name)

    def settle(self) -> None:
        """Waits until the last file is written."""
        if self._writing is not None:
            self._writing.result()

    def _write(self, path: Path, tensors: Mapping[str, mx.array], metadata: dict[str, str]) -> None:
        from safetensors.numpy import save

        views = _views(tensors)
        metadata["sha256"] = _digest(views, metadata["prefix"])
        data = save(views, metadata)
        try:
            for folder in (self._root, self._folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            _make_room(self._root, self._budget - len(data))
            write_atomic(path, data)
        except OSError as fault:
            # Answers do not depend on it; a retry at every prompt would only fill the log.
            self._off = True
            log.warning("prefixes are not written to disk any more: %s", fault.strerror)

    def _read(self, name: str, rows: int) -> Prefix | None:
        path = self._folder / f"{name}{_SUFFIX}"
        try:
            prefix = _loaded(path, self._make_caches(), rows)
            os.utime(path)  # the least recently used file is deleted first
        except FileNotFoundError:
            prefix = None  # another runner of this model made room
        except Exception as fault:  # any content: the prompt is then read without it
            why = str(fault) or type(fault).__name__
            log.warning("a prefix on disk cannot be used and is deleted: %s", why)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            prefix = None
        if prefix is None:
            self._names.discard(name)
        return prefix


def _names(prompt: Sequence[int], ends: Sequence[int], salt: Salt) -> Iterator[tuple[int, str]]:
    """The ends, each with a name made of the salt, the ids and the forwards up to there."""
    digest = hashlib.sha256(mark_of(salt))
    for begin, end in pairwise((0, *ends)):
        digest.update(array("Q", [end, *prompt[begin:end]]).tobytes())
        yield end, digest.copy().hexdigest()[:40]


def _described(
    caches: Sequence[Any], drafter: DraftPrefix | None, rows: int
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """The arrays of a prefix by name, lazy, and the metadata that is needed to read them."""
    tensors: dict[str, mx.array] = {}
    layers = [_layer(cache, rows, f"{number}.", tensors) for number, cache in enumerate(caches)]
    described: dict[str, Any] = {"rows": rows, "layers": layers, "drafter": None}
    if drafter is not None:
        cache = _layer(drafter.cache, drafter.rows, f"{_DRAFTER}.cache.", tensors)
        described["drafter"] = {"rows": drafter.rows, "cache": cache}
        if drafter.hidden is not None:
            tensors[_HIDDEN] = drafter.hidden
    bfloat16 = [name for name, each in tensors.items() if each.dtype == mx.bfloat16]
    for name in tensors:
        tensors[name] = mx.contiguous(tensors[name])
    for name in bfloat16:  # which NumPy does not have
        tensors[name] = tensors[name].view(mx.uint16)
    return tensors, {"prefix": json.dumps(described | {"bfloat16": bfloat16})}


def _layer(cache: Any, rows: int, begin: str, tensors: dict[str, mx.array]) -> Any:
    """Adds a cache's arrays to `tensors`. Returns the rest of it as JSON values."""
    if not has_rows(cache):
        return _plain(cache.state, begin, tensors)
    if cache.keys is None or not rows:
        return {"room": 0, "arrays": []}
    rows_kept = rows_of(cache, 0, rows)
    names = [f"{begin}{index}" for index in range(len(rows_kept.arrays))]
    tensors |= dict(zip(names, rows_kept.arrays, strict=True))
    return {"room": rows_kept.room, "arrays": names}


def _plain(state: Any, begin: str, tensors: dict[str, mx.array]) -> Any:
    """A state as JSON values, with names in place of its arrays."""
    if isinstance(state, mx.array):
        name = f"{begin}{len(tensors)}"
        tensors[name] = state
        return {"array": name}
    if isinstance(state, (list, tuple)):
        return [_plain(each, begin, tensors) for each in cast("Sequence[Any]", state)]
    assert state is None or isinstance(state, (int, float, str)), type(state)
    return state


def _with_arrays(plain: Any, tensors: Mapping[str, mx.array]) -> Any:
    """The inverse of `_plain`."""
    if isinstance(plain, dict):
        return tensors[cast("dict[str, str]", plain)["array"]]
    if isinstance(plain, list):
        return [_with_arrays(each, tensors) for each in cast("list[Any]", plain)]
    return plain


def _loaded(path: Path, caches: list[Any], rows: int) -> Prefix:
    """Reads a prefix. Raises ValueError for a file that does not match, or a parser's error."""
    if not stat.S_ISREG(path.lstat().st_mode):  # a pipe could be read without end
        raise ValueError("it is no regular file")
    tensors, metadata = cast(
        "tuple[dict[str, mx.array], dict[str, str]]", mx.load(str(path), return_metadata=True)
    )
    mx.eval(list(tensors.values()))
    if metadata["sha256"] != _digest(_views(tensors), metadata["prefix"]):
        raise ValueError("its bytes are not those that were written")
    described = json.loads(metadata["prefix"])
    if described["rows"] != rows or len(described["layers"]) != len(caches):
        raise ValueError("it is of another model")
    for name in described["bfloat16"]:
        tensors[name] = tensors[name].view(mx.bfloat16)
    layers = zip(caches, described["layers"], strict=True)
    filled = [_filled(cache, layer, tensors) for cache, layer in layers]
    mx.eval(cache_arrays(filled))
    if (drafter := described["drafter"]) is None:
        return Prefix(filled, rows, None)
    cache = cast("KVCache", _filled(KVCache(), drafter["cache"], tensors))
    return Prefix(filled, rows, DraftPrefix(cache, drafter["rows"], tensors.get(_HIDDEN)))


def _filled(cache: Any, plain: Any, tensors: Mapping[str, mx.array]) -> Any:
    """`cache`, which is empty, or one like it, filled as `plain` describes it."""
    if not has_rows(cache):
        cache.state = _with_arrays(plain, tensors)
        return cache
    if not plain["arrays"]:
        return cache
    form = (cache.group_size, cache.bits) if isinstance(cache, QuantizedKVCache) else None
    # With the room that it had, which may decide between kernels.
    return joined([LayerRows(tuple(tensors[n] for n in plain["arrays"]), plain["room"], form)])


def _views(tensors: Mapping[str, mx.array]) -> dict[str, Any]:
    """NumPy views of evaluated arrays."""
    import numpy as np

    return {name: np.asarray(memoryview(cast("Any", each))) for name, each in tensors.items()}


def _digest(views: Mapping[str, Any], description: str) -> str:
    digest = hashlib.sha256(f"{len(description)} {description};".encode())
    for name in sorted(views):
        digest.update(f"{name} {views[name].shape};".encode())
        digest.update(views[name].data)
    return digest.hexdigest()


def _has_drafter(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        with safe_open(str(path), framework="np") as file:
            return json.loads(file.metadata()["prefix"])["drafter"] is not None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as fault:
        log.info("a prefix on disk is written anew: %s", fault)
        return False


def _make_room(root: Path, room: int) -> None:
    """Deletes the least recently used files below `root` until `room` bytes hold the rest."""
    # A process that was killed leaves partial files, whose names have more behind the suffix.
    stats = [(path, path.stat()) for path in root.glob(f"*/*{_SUFFIX}*")]
    files = [(stat.st_mtime_ns, stat.st_size, path) for path, stat in stats]
    size = sum(each for _, each, _ in files)
    for _, bytes_, path in sorted(files):
        if size <= room:
            return
        path.unlink(missing_ok=True)
        size -= bytes_
