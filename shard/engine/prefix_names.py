"""Names of cached states, which follow from the ids of their rows and the forwards over them."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from .prefix_tree import PrefixNode, Salt, key_of

DRAFTS: Final = "-mtp"
"""End of the names of states with a drafter's part."""


def stems(keys: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, str]]:
    """The end of each forward over a prompt, with a name made of all ends and keys up to it."""
    digest = hashlib.sha256()
    for end, key in keys:
        digest.update(f"{end} {len(key)};".encode())
        digest.update(key)
        yield end, digest.hexdigest()[:40]


def stems_of_path(path: Iterable[PrefixNode]) -> Iterator[tuple[int, str]]:
    """The names along a path of the tree."""
    return stems((node.end, node.key) for node in path)


def stems_of_prompt(
    prompt: Sequence[int], ends: Sequence[int], salt: Salt
) -> Iterator[tuple[int, str]]:
    """The names of all states that a request may begin behind. `ends`: of all forwards."""
    return stems(
        (end, key_of(prompt, begin, end, salt)) for begin, end in pairwise((0, *ends[:-1]))
    )
