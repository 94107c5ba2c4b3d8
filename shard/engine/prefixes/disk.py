"""Prefixes on disk: states after prompts, for the next process of the same stage.

A file has the rows after those of its parent, the file of an earlier state of the same prompt, so
that the turns of a conversation are written once each. The states after its last row are whole.
States to be written wait in the memory tier, as long as they have room there, until no request is
in progress; a write is given up when a request begins. Files reveal prompts, as the caches of a
running model do: only the node's user may read them.
"""

import contextlib
import hashlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ....placement.gpu_faults import is_failed_command
from ...checkpoint.files import write_atomic
from ...checkpoint.prefix_files import (
    FORMAT,
    SUFFIX,
    PrefixFile,
    StoredTensor,
    files_in,
    make_room,
    opened,
    pieces_of,
)
from ..states.state import State
from .encoding import CONTENT_FAULTS, can_encode, encoded, read_state
from .prompt_path import DRAFTS, PromptPath, stems
from .tree import PrefixNode

log = logging.getLogger(__name__)

MIN_ROWS: Final = 128
"""Fewer rows after the parent's are computed about as fast as a file is read."""
FILE_EVERY: Final = 4096
"""Rows of one prompt after which another file is written, besides those of its first turn and of
its last state."""
MAX_PENDING: Final = 64
"""States that wait to be written; the oldest is dropped for another one."""


class _RequestBegan(Exception):
    """A request began while a file was written."""


class PrefixDisk:
    """The files of one stage of one model. All methods but `longest` and `descriptions`
    run on the compute thread; another thread writes."""

    def __init__(
        self,
        root: Path,
        key: str,
        budget: int,
        make_caches: Callable[[], list[Any]],
        model: str = "",
    ) -> None:
        """`key`: everything but the ids that decides a prefix's bits. `budget`: bytes of all files
        below `root`. `make_caches` makes the empty caches of one request. `model`: its name, for
        people.
        """
        self._root = root
        self._folder = root / f"{FORMAT}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        self._budget = budget
        self._make_caches = make_caches
        self._model = model
        self._pending = deque[weakref.ref[PrefixNode]](maxlen=MAX_PENDING)
        self._is_idle = threading.Event()
        self._writing: tuple[threading.Thread, weakref.ref[PrefixNode]] | None = None
        self._is_unwritten = False
        """Whether the last write was given up, and is to be done again."""
        self._is_off = False
        self._sizes = _sizes_in(self._folder)
        for folder in (root, self._folder):
            if folder.is_symlink():
                self._turn_off(ValueError(f"{folder} is a link; put a folder there"))
                self._sizes.clear()

    @property
    def size(self) -> int:
        """Bytes of this stage's files, as far as this process knows."""
        return sum(list(self._sizes.values()))

    def ends(self, path: PromptPath) -> list[int]:
        """Rows of all prefixes that `find` might return, ascending."""
        return [end for end, _ in self._candidates(path)]

    def find(self, path: PromptPath, beyond: int = 0) -> State | None:
        """See `PrefixCache.find`. What cannot be read is as good as absent, and is deleted."""
        for end, name in reversed(self._candidates(path)):
            if end <= beyond:
                break
            if (state := self._read(name, end, path.ids)) is not None:
                return state
        return None

    def descriptions(self, path: PromptPath) -> list[tuple[Path, dict[str, Any]]]:
        """Any thread: the files that have the longest prefix, parents first, with their
        descriptions. Raises what `_files` raises."""
        stored = self._candidates(path)
        if not stored:
            return []
        rows, name = stored[-1]
        chain = [name]
        described = [file.description for file in self._files(chain, rows)]
        return list(zip(map(self._path, chain), described, strict=True))[::-1]

    def longest(self, path: PromptPath) -> tuple[int, int]:
        """Any thread: the rows of the longest prefix that has a file, and the bytes of the files
        along it. Reads no file: `find` may not be able to use them."""
        stored = self._candidates(path)
        if not stored:
            return 0, 0
        rows = stored[-1][0]
        files = self._candidates(replace(path.up_to(rows).continued, drafts=False))
        return rows, sum(self._sizes.get(name, 0) for _, name in files)

    def pause(self) -> None:
        """Gives up a write in progress, since a request begins."""
        self._is_idle.clear()

    def put(self, node: PrefixNode) -> None:
        """Marks a cached state to be written later.

        It takes the place of earlier states of its prompt, whose rows its own file will have,
        except for the first turn's, which other prompts share, and one every FILE_EVERY rows.
        """
        path = node.path
        waiting = {each: reference for reference in self._pending if (each := reference())}
        last = max((end for end, stem in node.stems if self._name_of(stem)), default=0)
        for earlier in path[:-1]:
            if earlier not in waiting:
                continue
            if earlier.first_turn or earlier.end - last >= FILE_EVERY:
                last = earlier.end
            else:
                self._pending.remove(waiting[earlier])
        if node not in waiting:
            self._pending.append(weakref.ref(node))

    def save_next(self, is_cached: Callable[[PrefixNode], bool]) -> bool:
        """Begins to write a marked state, while no request is in progress. Returns False if nothing
        is left to do.

        `is_cached`: whether a state is still in the memory tier.
        """
        self._is_idle.set()
        if self._writing is not None:
            thread, reference = self._writing
            if thread.is_alive():
                return True
            self._writing = None
            if self._is_unwritten:
                self._pending.append(reference)
        while self._pending and not self._is_off:
            reference = self._pending.popleft()
            node = reference()
            try:
                if node is not None and is_cached(node) and self._begin_write(node, reference):
                    return True
            except (OSError, RuntimeError) as fault:  # no memory for it, or no thread
                if is_failed_command(str(fault)):
                    raise
                self._turn_off(fault)
        return False

    def clear(self) -> None:
        """Deletes all files of this stage."""
        self.pause()
        self._pending.clear()
        if self._writing is not None:
            self._writing[0].join()
            self._writing = None
        self._delete(list(self._sizes))

    def _candidates(self, path: PromptPath) -> list[tuple[int, str]]:
        """The rows and names of files that a request may begin after, ascending."""
        if not self._sizes:
            return []
        named = [
            (end, self._name_of(stem, drafts=path.drafts))
            for end, stem in stems(path.inner.forwards())
        ]
        return [(end, name) for end, name in named if name]

    def _name_of(self, stem: str, *, drafts: bool = False) -> str:
        """The name of a state's file; empty if there is none. `drafts`: with a drafter's part."""
        names = (stem + DRAFTS,) if drafts else (stem + DRAFTS, stem)
        return next((name for name in names if name in self._sizes), "")

    def _begin_write(self, node: PrefixNode, reference: "weakref.ref[PrefixNode]") -> bool:
        """Begins to write a state. Returns False if it is not worth a file, or has one."""
        if not can_encode(node):
            return False
        path, drafts = node.path, node.is_usable(drafts=True)
        *earlier, (_, stem) = node.stems
        if self._name_of(stem, drafts=drafts):
            return False
        parents = [(end, name) for end, each in earlier if (name := self._name_of(each))]
        begin, parent = parents[-1] if parents else (0, None)
        if node.end - begin < MIN_ROWS:
            return False
        description, tensors = encoded(path, begin, drafts=drafts)
        if sum(tensor.data.nbytes for tensor in tensors.values()) > self._budget:
            return False
        name = stem + DRAFTS * drafts
        description |= {
            "key": self._folder.name,
            "name": name,
            "parent": parent,
            "model": self._model,
        }
        chain = [name, *(each for _, each in reversed(parents))]
        self._is_unwritten = False
        thread = threading.Thread(
            target=self._write, args=(chain, description, tensors), name="prefix-disk", daemon=True
        )
        self._writing = (thread, reference)
        thread.start()
        return True

    def _write(
        self,
        chain: Sequence[str],
        description: Mapping[str, Any],
        tensors: Mapping[str, StoredTensor],
    ) -> None:
        """Writes a file, on a thread of its own. `chain`: its name, and those of its parents."""
        size = sum(each.data.nbytes for each in tensors.values())
        try:
            for folder in (self._root, self._folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            try:
                self._touch(chain[1:])  # without its parents' rows the file is of no use
                make_room(self._root, self._budget - size)
                pieces = pieces_of(description, tensors, self._require_idle)
                write_atomic(self._path(chain[0]), pieces)
                self._touch(chain)
                make_room(self._root, self._budget)  # the header is not in `size`
            except FileNotFoundError:  # somebody deleted the folder: it is done again
                self._is_unwritten = True
            self._sizes = _sizes_in(self._folder)
        except _RequestBegan:
            self._is_unwritten = True
        except OSError as fault:
            self._turn_off(fault)

    def _turn_off(self, fault: Exception) -> None:
        # Answers do not depend on it; a retry at every prompt would only fill the log.
        self._is_off = True
        why = fault.strerror if isinstance(fault, OSError) else str(fault)
        log.warning("prefixes are not kept on disk: %s", why or type(fault).__name__)

    def _require_idle(self) -> None:
        if not self._is_idle.is_set():
            raise _RequestBegan

    def _read(self, name: str, rows: int, ids: Sequence[int]) -> State | None:
        """The state in a file. Deletes the file if it cannot be used."""
        chain = [name]
        try:
            state = read_state(self._files(chain, rows), self._make_caches, ids)
            self._touch(chain)
            return state
        except FileNotFoundError:  # another process made room, or a person did
            log.info("a prefix on disk is gone")
        except CONTENT_FAULTS as fault:  # the prompt is then read without it
            if is_failed_command(str(fault)):
                raise  # of a command that had begun before, whose numbers others have
            why = str(fault) or type(fault).__name__
            log.warning("a prefix on disk cannot be used and is deleted: %s", why)
        self._delete(chain)  # without their parent's rows the others are of no use
        return None

    def _files(self, chain: list[str], rows: int) -> Iterator[PrefixFile]:
        """The first file of `chain` and its parents, each open until the next one. Their names are
        added to `chain`. Raises OSError, ValueError for a file that does not match, or a parser's
        error."""
        end = rows
        while True:
            with opened(self._path(chain[-1])) as file:
                described = file.description
                identity = described["key"], described["name"], described["rows"]
                begin, parent = described["begin"], described["parent"]
                if identity != (self._folder.name, chain[-1], end):
                    raise ValueError("it is of another prompt")
                if not 0 <= begin < end or (parent is None) != (begin == 0):
                    raise ValueError("its rows do not follow those of its parent")
                yield file
            if parent is None:
                return
            chain.append(parent)
            end = begin

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"

    def _touch(self, chain: Iterable[str]) -> None:
        """Marks files as used, parents last: a file goes before those that it needs.

        Raises FileNotFoundError.
        """
        now = time.time_ns()
        for later, name in enumerate(chain):
            os.utime(self._path(name), ns=(now + later, now + later))

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            _ = self._sizes.pop(name, None)
            with contextlib.suppress(OSError):
                self._path(name).unlink(missing_ok=True)


def _sizes_in(folder: Path) -> dict[str, int]:
    """The bytes of each whole file, by its name without the suffix."""
    sizes = dict[str, int]()
    for path in files_in(folder):
        if path.suffix == SUFFIX:
            with contextlib.suppress(FileNotFoundError):
                sizes[path.stem] = path.lstat().st_size
    return sizes
