"""The lists, objects and elements of JSON texts, counted before a parser sees them."""

from dataclasses import dataclass
from typing import Final

MAX_CONTAINERS: Final = 100_000
"""The limit of lists and objects in one body or conversation: Python parses them in 30
ms, without a pause."""
MAX_ELEMENTS: Final = 1 << 19
"""The limit of commas in it: as many strings are parsed in 60 ms."""

_FEW: Final = 64
"""Brackets and commas of one of many texts that are not worth a look at which are in strings."""


@dataclass(slots=True)
class Room:
    """The lists, objects and elements that the JSON of one request may still have."""

    containers: int = MAX_CONTAINERS
    elements: int = MAX_ELEMENTS

    def take(self, containers: int, elements: int) -> bool:
        """Whether there is room for `count`; they are taken if so."""
        if containers > self.containers or elements > self.elements:
            return False
        self.containers, self.elements = self.containers - containers, self.elements - elements
        return True


def fits(body: bytes, room: Room | None = None) -> bool:
    """Whether there is room for the lists, objects and elements of `body`, which are taken then.

    It runs before the parser, which holds the interpreter's lock from the first byte to the last.
    """
    most = _sizes(body, 0, len(body))
    if room is None:
        room = Room()
        if room.take(*most):
            return True
    elif max(most) <= _FEW and room.take(*most):
        return True
    # Brackets in strings do not count. Without escapes every quote begins or ends a string.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    containers = elements = strings = position = 0
    while position >= 0:
        begin = plain.find(b'"', position)
        sizes = _sizes(plain, position, begin if begin >= 0 else len(plain))
        containers, elements = containers + sizes[0], elements + sizes[1]
        strings += 1
        if containers > room.containers or max(elements, strings // 2) > room.elements:
            return False
        end = plain.find(b'"', begin + 1) if begin >= 0 else -1
        position = end + 1 if end >= 0 else -1
    return room.take(containers, max(elements, strings // 2))


def _sizes(body: bytes, begin: int, end: int) -> tuple[int, int]:
    """The number of lists and objects that begin there, and of commas."""
    opened = body.count(b"[", begin, end) + body.count(b"{", begin, end)
    return opened, body.count(b",", begin, end)
