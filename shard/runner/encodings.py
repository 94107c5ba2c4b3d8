"""The last prompts that were encoded, so that a request which asks twice is encoded once.

Also texts and ids without a chat template.
"""

import hashlib
import time
from array import array
from collections.abc import Callable
from typing import Final, NamedTuple

from ...placement.errors import PROMPT, InvalidRequest
from ...proto import peer_pb2 as pb
from ..model.stage_limits import StageLimits
from ..text.image_rows import PreparedImage
from ..text.prompt_encoder import PromptEncoder

MAX_ENCODINGS: Final = 8
MAX_BYTES: Final = 128 << 20
"""Ids, and the pixels of images, of all of them together."""
MAX_AGE_S: Final = 60.0
"""A template may write the date into a prompt, so none is kept for long."""


class Encoding(NamedTuple):
    """A prompt as the engine takes it."""

    notes: tuple[str, ...]
    ids: "array[int]"
    images: tuple[PreparedImage, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of its ids and of its images' pixels."""
        pixels = sum(len(image.pixels) for image in self.images)
        return len(self.ids) * self.ids.itemsize + pixels


class Encodings:
    """Encodings by a digest of all that decides them. Bounded in number, size and age."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._entries = dict[bytes, tuple[float, Encoding]]()
        """The least recently used ones first."""

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
        """The encoding, or None if there is none that is young enough."""
        entry = self._entries.pop(key, None)
        if entry is None or self._clock() - entry[0] > MAX_AGE_S:
            return None
        self._entries[key] = entry
        return entry[1]

    def put(self, key: bytes, encoding: Encoding) -> None:
        """Adds an encoding; the least recently used ones give way. Too large a one is not kept."""
        if encoding.bytes > MAX_BYTES:
            return
        _ = self._entries.pop(key, None)
        self._entries[key] = self._clock(), encoding
        while len(self._entries) > MAX_ENCODINGS or self._bytes > MAX_BYTES:
            del self._entries[next(iter(self._entries))]

    @property
    def _bytes(self) -> int:
        return sum(encoding.bytes for _, encoding in self._entries.values())


async def encode_bare(
    request: pb.EncodeRequest, prompts: PromptEncoder, limits: StageLimits
) -> pb.EncodeReply:
    """The ids of a text, or the text of ids. Raises InvalidRequest."""
    match request.WhichOneof("what"):
        case "text":
            ids = await prompts.encode_text(request.text, limits.context_length)
            return pb.EncodeReply(ids=ids, context_length=limits.context_length)
        case "token_ids":
            if not all(0 <= token < limits.vocabulary for token in request.token_ids.ids):
                raise InvalidRequest(f"tokens are 0 to {limits.vocabulary - 1}", param=PROMPT)
            return pb.EncodeReply(text=await prompts.decode(request.token_ids.ids))
        case "messages":
            raise InvalidRequest("an embedder has no chats; send a text", param=PROMPT)
        case None:
            raise InvalidRequest("there is nothing to encode", param=PROMPT)
