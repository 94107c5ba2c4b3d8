"""The last prompts that were encoded, so that a request which asks twice is encoded once."""

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from ...proto import peer_pb2 as pb
from ..text.image_rows import PreparedImage

MAX_ENCODINGS: Final = 8
MAX_IDS: Final = 1 << 21
"""Ids of all of them together: 8 MiB."""
MAX_PIXELS: Final = 128 << 20
"""Bytes of the pixels of all images together."""
MAX_AGE_S: Final = 60.0
"""A template may write the date into a prompt, so none is kept for long."""


class Encoding(NamedTuple):
    """A prompt as the engine takes it."""

    notes: tuple[str, ...]
    ids: "array[int]"
    images: tuple[PreparedImage, ...] = ()

    @property
    def pixels(self) -> int:
        """Bytes of its images' pixels."""
        return sum(len(image.pixels) for image in self.images)


class Encodings:
    """Encodings by a digest of all that decides them. Bounded in number, size and age."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._entries = OrderedDict[bytes, tuple[float, Encoding]]()

    @staticmethod
    def key(request: pb.GenerateRequest) -> bytes:
        """A digest of all fields of a request that decide the ids of its prompt."""
        digest = hashlib.sha256(f"{request.WhichOneof('prompt')} {len(request.tools)};".encode())
        digest.update(request.tools.encode())
        match request.WhichOneof("prompt"):
            case "messages":
                digest.update(request.messages.SerializeToString(deterministic=True))
            case "token_ids":
                digest.update(array("i", request.token_ids.ids).tobytes())
            case _:
                suffix = request.suffix if request.HasField("suffix") else None
                digest.update(repr((request.text, suffix)).encode())
        for image in request.images:
            digest.update(f"{len(image.data)};".encode())
            digest.update(image.data)
        return digest.digest()

    def get(self, key: bytes) -> Encoding | None:
        """None if there is none, or it is too old."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        made_at, encoding = entry
        if self._clock() - made_at > MAX_AGE_S:
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return encoding

    def put(self, key: bytes, encoding: Encoding) -> None:
        """Adds an encoding; the least recently used ones give way. Too large a one is not kept."""
        if len(encoding.ids) > MAX_IDS or encoding.pixels > MAX_PIXELS:
            return
        self._entries[key] = self._clock(), encoding
        self._entries.move_to_end(key)
        while len(self._entries) > MAX_ENCODINGS or self._is_too_large:
            _ = self._entries.popitem(last=False)

    @property
    def _is_too_large(self) -> bool:
        encodings = [encoding for _, encoding in self._entries.values()]
        ids, pixels = (
            sum(each) for each in ([len(e.ids) for e in encodings], [e.pixels for e in encodings])
        )
        return ids > MAX_IDS or pixels > MAX_PIXELS
