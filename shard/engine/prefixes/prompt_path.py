"""A prompt as the forwards over it divide it: the keys and names of the states after them."""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, TypeAlias

Salt: TypeAlias = bytes
"""Requests share cached prefixes only with requests of the same salt."""
DRAFTS: Final = "-mtp"
"""End of the names of states with a drafter's part."""


@dataclass(frozen=True, slots=True)
class PromptPath:
    """The forwards over a prompt, which lead from the root of the prefix cache's tree to a node."""

    ids: Sequence[int]
    ends: Sequence[int]
    """The row after each forward, ascending."""
    salt: Salt = b""
    drafts: bool = False
    """Whether only states with a draft state are of use."""

    def forwards(self) -> Iterator[tuple[int, bytes]]:
        """The row after each forward, and the forward's key: the ids of its rows."""
        for begin, end in pairwise((0, *self.ends)):
            yield end, key_of(self.ids, begin, end, self.salt)

    @property
    def inner(self) -> "PromptPath":
        """The path without its last forward, which no request skips: its logits are needed."""
        return replace(self, ends=self.ends[:-1])

    @property
    def continued(self) -> "PromptPath":
        """The path with one more forward, so that a request may skip all of its own."""
        return replace(self, ends=[*self.ends, max(self.ends, default=0) + 1])

    def up_to(self, rows: int) -> "PromptPath":
        """The forwards over the first `rows` rows."""
        return replace(self, ends=[end for end in self.ends if end <= rows])


def key_of(prompt: Sequence[int], begin: int, end: int, salt: Salt = b"") -> bytes:
    """The key of the forward over the rows [begin, end) of `prompt`.

    `salt` is part of the keys of first forwards, so that prompts of different salts share no node.
    """
    mark = salt + b":" if salt and not begin else b""
    return mark + array("q", prompt[begin:end]).tobytes()


def stems(keys: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, str]]:
    """The end of each forward over a prompt, with a name made of all ends and keys up to it."""
    digest = hashlib.sha256()
    for end, key in keys:
        digest.update(f"{end} {len(key)};".encode())
        digest.update(key)
        yield end, digest.hexdigest()[:40]
