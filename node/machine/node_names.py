"""Which node a person means by a name or by the beginning of an id."""

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

_SHORTEST_ID: Final = 8
"""Ids begin at random: a shorter text may begin one that nobody meant, and rekey is final."""

_Node = TypeVar("_Node")


def matching_nodes(
    text: str, nodes: Iterable[_Node], *, name: Callable[[_Node], str], id: Callable[[_Node], str]
) -> list[_Node]:
    """Nodes with that very name; without one, those whose id begins so, with 8 characters or more.

    More than one is the caller's to refuse.
    """
    known = list(nodes)
    named = [node for node in known if name(node) == text]
    if named or len(text) < _SHORTEST_ID:
        return named
    return [node for node in known if id(node).startswith(text)]
