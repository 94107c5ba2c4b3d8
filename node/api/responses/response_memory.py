"""The latest responses by id, in memory alone, for requests that continue them or refer to them.

The AI SDK's OpenAI provider refers to earlier items by default (`item_reference`), sessions of
Microsoft's agent-framework continue responses (`previous_response_id`); openai-agents and LangChain
do so on demand. None of the clients reads, lists, follows or deletes responses unasked.
"""

import asyncio
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ....placement.errors import InvalidRequest, PreviousResponseNotFound
from ...machine.json_size import MAX_CONTAINERS, MAX_ELEMENTS, Room, fits
from ..http.guard import MAX_BODY_BYTES
from ..http.strict_json import encode

PREVIOUS: Final = "previous_response_id"
Json = dict[str, Any]
_ITEM_ID: Final = re.compile(r"item_([0-9a-f]+)_[0-9]+")
_LEAST_COST: Final = 64_000
"""The bytes that a response counts at least, which bounds their number too."""


@dataclass(frozen=True, slots=True)
class _Response:
    """`parts`: the conversation up to its output, the last one, each packed. `cost`: their bytes,
    although the responses of one conversation share them."""

    owner: str
    parts: tuple[bytes, ...] = field(repr=False)
    cost: int
    expiry: asyncio.TimerHandle


class ResponseMemory:
    """Responses that have ended, within limits on bytes and age.

    Where there are too many, the owner with the most loses the oldest. To others than its owner a
    response is as unknown as one that never was.
    """

    def __init__(
        self,
        *,
        max_bytes: int = 64_000_000,
        age_s: float = 3600,
        max_conversation: int = MAX_BODY_BYTES,
    ) -> None:
        """`max_conversation`: the most bytes of JSON that a request may continue or refer to."""
        self._max_bytes = max_bytes
        self._age_s = age_s
        self._max_conversation = max_conversation
        self._responses: dict[str, _Response] = {}
        """In the order of their ends."""

    def add(self, id: str, owner: str, conversation: tuple[bytes, ...], output: list[Json]) -> None:
        """Adds a response to the packed `conversation`. Its loop forgets it after `age_s`."""
        parts = (*conversation, pack(output))
        cost = max(_LEAST_COST, sum(len(part) for part in parts))
        expiry = asyncio.get_running_loop().call_later(self._age_s, self._drop, id)
        self._responses[id] = _Response(owner, parts, cost, expiry)
        costs = Counter[str]()
        for response in self._responses.values():
            costs[response.owner] += response.cost
        while costs.total() > self._max_bytes:
            ((most, _),) = costs.most_common(1)
            oldest = next(id for id, each in self._responses.items() if each.owner == most)
            costs[most] -= self._drop(oldest)

    def conversation(self, id: str, owner: str) -> tuple[bytes, ...]:
        """The packed items with which a response that continues this one begins.

        Raises PreviousResponseNotFound.
        """
        response = self._responses.get(id)
        if response is None or response.owner != owner:
            raise PreviousResponseNotFound(
                f"this node has no response '{id[:64]}': it was made with \"store\": false, with "
                "another key, on another node, or too long ago; send the whole conversation as "
                "'input'",
                param=PREVIOUS,
            )
        return response.parts

    def outputs(self, item_ids: Iterable[str], owner: str) -> list[bytes]:
        """The packed outputs of the owner's responses that gave items these ids, each once."""
        matches = [match for id in item_ids if (match := _ITEM_ID.fullmatch(id))]
        responses = (self._responses.get(id) for id in {f"resp_{match[1]}" for match in matches})
        return [each.parts[-1] for each in responses if each is not None and each.owner == owner]

    def unpack(self, parts: Sequence[bytes], param: str) -> list[Json]:
        """The items of these parts, for a thread. Raises InvalidRequest if that is too much."""
        items, room, remaining = list[Json](), Room(), self._max_conversation
        for part in parts:
            text = zlib.decompress(part)
            remaining -= len(text)
            if remaining < 0 or not fits(text, room):
                raise InvalidRequest(
                    f"what '{param}' continues has more than {self._max_conversation} bytes, or "
                    f"{MAX_CONTAINERS} lists and objects, or {MAX_ELEMENTS} elements; begin "
                    "another conversation with what matters of it",
                    param=param,
                )
            items += json.loads(text)
        return items

    def _drop(self, id: str) -> int:
        """Forgets a response, and returns its cost."""
        response = self._responses.pop(id)
        response.expiry.cancel()
        return response.cost


def pack(items: Iterable[Json]) -> bytes:
    """Compressed JSON. Each item is encoded by itself, so that other threads run in between."""
    return zlib.compress(b"[" + b",".join(encode(item) for item in items) + b"]", 1)
