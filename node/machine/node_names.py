"""Nodes by name or by the beginning of an id, as people refer to them."""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from ...placement.errors import InvalidRequest

_SHORTEST_ID: Final = 8
"""Ids are random: a shorter text may match an unintended node."""

_Node = TypeVar("_Node")


def named_node(
    text: str,
    nodes: Sequence[_Node],
    *,
    name: Callable[[_Node], str],
    id: Callable[[_Node], str],
    group: str,
    param: str,
) -> _Node:
    """The node with exactly that name; if there is none, the one whose id begins with the text.

    A text of less than 8 characters is no beginning. Raises InvalidRequest of `param` unless it is
    one of the nodes, whose `group` the message names.
    """
    matches = [node for node in nodes if name(node) == text]
    if not matches:
        begins = len(text) >= _SHORTEST_ID
        matches = [n for n in nodes if id(n) == text or (begins and id(n).startswith(text))]
    if len(matches) == 1:
        return matches[0]
    which = "several" if matches else "none"
    listed = ", ".join(f"{name(node)} ({id(node)})" for node in matches or nodes) or "-"
    raise InvalidRequest(
        f"'{text[:64]}' means {which} of {group}; give a name, or {_SHORTEST_ID} characters or "
        f"more of an id: {listed}",
        param=param,
    )
