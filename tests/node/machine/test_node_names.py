"""A name before the beginning of an id, and no beginning so short that it may hit by chance."""

import pytest

from exo_node.node.machine.node_names import matching_nodes

NODES = [("a", "dfywlshsk6la2yuad37a"), ("b", "dfywlshsr2d2"), ("c", "bxxxxxxxxxxx"), ("c", "zz")]


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("a", [NODES[0]]),
        ("b", [NODES[1]]),  # a name, though another id begins with it
        ("c", [NODES[2], NODES[3]]),
        ("d", []),
        ("dfywlsh", []),
        ("dfywlshs", [NODES[0], NODES[1]]),
        ("dfywlshsk", [NODES[0]]),
        ("zz", []),
        ("", []),
    ],
)
def test_a_name_or_at_least_eight_characters_of_an_id(
    text: str, matches: list[tuple[str, str]]
) -> None:
    assert matching_nodes(text, NODES, name=lambda n: n[0], id=lambda n: n[1]) == matches
