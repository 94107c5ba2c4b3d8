"""The last prompts that were encoded, so that a request which asks twice is encoded once."""

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from ...proto import peer_pb2 as pb

MAX_ENCODINGS: Final = 8
MAX_IDS: Final = 1 << 21
"""Ids of all of them together: 8 MiB."""
MAX_AGE_S: Final = 60.0
"""A template may write the date into a prompt, so none is kept for long."""


class Encodings:
    """Ids and notes by a digest of all that decides them. Bounded in number, ids and age."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._entries = OrderedDict[bytes, "tuple[float, tuple[str, ...], array[int]]"]()

    @staticmethod
    def key(request: pb.GenerateRequest) -> bytes:
        """A digest of all fields of a request that decide the ids of its prompt."""
        digest = hashlib.sha256(f"{request.WhichOneof('prompt')} {len(request.tools)};".encode())
        digest.update(request.tools.encode())
        match request.WhichOneof("prompt"):
            case "messages":
                digest.update(request.messages.SerializeToString(deterministic=True))
            case "token_ids":
                digest.update(array("I", request.token_ids.ids).tobytes())
            case _:
                digest.update(request.text.encode())
        return digest.digest()

    def get(self, key: bytes) -> tuple[list[str], list[int]] | None:
        """Notes and ids, as new lists; None if there are none, or they are too old."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        made_at, notes, ids = entry
        if self._clock() - made_at > MAX_AGE_S:
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return list(notes), ids.tolist()

    def put(self, key: bytes, notes: Sequence[str], ids: Sequence[int]) -> None:
        """Adds an encoding; the least recently used ones give way. Too long a one is not kept."""
        if len(ids) > MAX_IDS:
            return
        self._entries[key] = self._clock(), tuple(notes), array("I", ids)
        self._entries.move_to_end(key)
        while len(self._entries) > MAX_ENCODINGS or self._size > MAX_IDS:
            _ = self._entries.popitem(last=False)

    @property
    def _size(self) -> int:
        return sum(len(ids) for _, _, ids in self._entries.values())
