"""The block about joining on the node's terminal."""

from dataclasses import replace

from joiners import party

from exo_node.node.join.joining import JoinNotice, notice

MINI = replace(party("a"), name="mini")
STUDIO = replace(party("b"), name="studio")
DESK = replace(party("c"), name="desk")


def test_a_new_node_beside_others_names_them_and_both_commands() -> None:
    assert notice(MINI, [STUDIO, DESK], [DESK], "445143").split("\n") == [
        "Other nodes here: studio, desk.",
        f"To let this one (mini, {MINI.node[:8]}) in, run there:  exo-node approve 445 143",
        "To let one of them in here:  exo-node approve DIGITS NAME",
        "  with the digits that it shows itself",
    ]


def test_each_side_alone_says_only_what_it_can_do() -> None:
    assert "DIGITS" not in notice(MINI, [STUDIO], [], "445143")
    assert "this one" not in notice(STUDIO, [], [MINI], "")
    assert notice(MINI, [], [], "") == ""


def test_nodes_of_one_name_are_told_apart_by_their_ids() -> None:
    block = notice(MINI, [replace(STUDIO, name="mini")], [], "445143")
    assert f"mini ({STUDIO.node[:8]})" in block and f"this one (mini, {MINI.node[:8]})" in block


def test_many_nodes_are_counted() -> None:
    crowd = [replace(party(f"n{i}"), name=f"n{i}") for i in range(60)]
    assert "n5 and 54 more." in notice(MINI, [], crowd, "")


def test_a_block_is_printed_once_and_again_when_another_one_stands() -> None:
    notices = JoinNotice()
    looks = ["", "a", "b", "b", "b", "", "b", "c", "c", "", "", "c", "c"]
    assert [notices.due(look) for look in looks] == [
        "", "", "", "b", "", "", "", "", "c", "", "", "", "c",
    ]  # fmt: skip
