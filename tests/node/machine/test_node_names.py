"""A name before the beginning of an id, and no beginning so short that it may hit by chance."""

import pytest

from exo_node.node.machine.node_names import named_node
from exo_node.placement.errors import InvalidRequest

NODES = [("a", "dfywlshsk6la2yuad37a"), ("b", "dfywlshsr2d2"), ("c", "bxxxxxxxxxxx"), ("c", "zz")]


def named(text: str) -> tuple[str, str]:
    return named_node(
        text, NODES, name=lambda n: n[0], id=lambda n: n[1], group="the nodes", param="name"
    )


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("a", NODES[0]),
        ("b", NODES[1]),  # a name, though another id begins with it
        ("dfywlshsk", NODES[0]),
        ("zz", NODES[3]),  # a whole id
    ],
)
def test_a_name_or_at_least_eight_characters_of_an_id(text: str, node: tuple[str, str]) -> None:
    assert named(text) == node


@pytest.mark.parametrize(
    ("text", "which", "listed"),
    [
        *(("c", "several", "c"), ("dfywlshs", "several", "a")),
        *((text, "none", "a") for text in ("d", "dfywlsh", "z", "")),
    ],
)
def test_a_text_that_means_none_or_several_lists_the_nodes(
    text: str, which: str, listed: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"'{text}' means {which} of the nodes.*: {listed} "):
        _ = named(text)
