"""Nodes by name or by the beginning of an id, as people refer to them."""

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

_SHORTEST_ID: Final = 8
"""Ids are random: a shorter text may match an unintended node, and a rekey cannot be undone."""

_Node = TypeVar("_Node")


def matching_nodes(
    text: str, nodes: Iterable[_Node], *, name: Callable[[_Node], str], id: Callable[[_Node], str]
) -> list[_Node]:
    """Nodes with exactly that name; if there is none, those whose id begins with the text.

    A text of less than 8 characters matches no id. The caller refuses several matches.
    """
    candidates = list(nodes)
    named = [node for node in candidates if name(node) == text]
    if named or len(text) < _SHORTEST_ID:
        return named
    return [node for node in candidates if id(node).startswith(text)]
