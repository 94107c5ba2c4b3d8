"""What a stage sent on: kept up to a limit, sent again from a row on, as far as it goes."""

from collections.abc import Sequence

import pytest

from exo_node.placement.errors import StateLost
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.pipeline.frames import HiddenBlock
from exo_node.shard.pipeline.replay_buffer import ReplayBuffer

ROW = 4
"""Bytes of a row."""


def block(position: int, rows: int, schedule: Sequence[int] = ()) -> HiddenBlock:
    data = b"".join(at.to_bytes(ROW) for at in range(position, position + rows))
    ids = tuple(range(position, position + rows))
    return HiddenBlock("r1", 1, position, rows, ids, pb.REPLY_LAST, data, tuple(schedule))


def trail(*blocks: tuple[int, int], limit: int = 1000) -> ReplayBuffer:
    made = ReplayBuffer(limit)
    for position, rows in blocks:
        made.add(block(position, rows))
    return made


def spans(blocks: Sequence[HiddenBlock]) -> list[tuple[int, int]]:
    return [(each.position, each.rows) for each in blocks]


def test_what_is_wanted_is_sent_once_and_goes_on_with_what_is_added() -> None:
    sent = trail((0, 4), (4, 1))
    sent.want(0, 6, answer=False)
    assert spans(sent.unsent(2)) == [(0, 4), (4, 1)]
    assert sent.unsent(2) == []
    sent.add(block(5, 1))
    sent.add(block(6, 1))
    assert spans(sent.unsent(2)) == [(5, 1)], "row 6 is of the attempt itself"


def test_what_is_sent_again_rebuilds_for_another_attempt_and_asks_for_nothing() -> None:
    sent = trail((0, 4))
    sent.want(0, 4, answer=False)
    [again] = sent.unsent(7)
    assert (again.attempt, again.reply, again.rebuilds) == (7, pb.REPLY_NONE, True)
    sent.want(0, 4, answer=True)
    assert [each.reply for each in sent.unsent(8)] == [pb.REPLY_LAST]


def test_what_is_held_already_is_left_out() -> None:
    sent = trail((0, 4), (4, 1), (5, 1))
    sent.want(4, 6, answer=False)
    assert spans(sent.unsent(2)) == [(4, 1), (5, 1)]


def test_a_block_is_cut_where_one_of_its_forwards_ended() -> None:
    sent = ReplayBuffer()
    sent.add(block(0, 6, (2, 1, 3)))
    sent.want(3, 6, answer=False)
    [rest] = sent.unsent(2)
    assert (rest.position, rest.rows, rest.schedule, rest.tokens) == (3, 3, (3,), (3, 4, 5))
    assert rest.data == block(3, 3).data


@pytest.mark.parametrize("row", [1, 4])
def test_a_forward_cannot_be_sent_in_part(row: int) -> None:
    sent = ReplayBuffer()
    sent.add(block(0, 6, (2, 1, 3)))
    sent.want(row, 6, answer=False)
    with pytest.raises(StateLost, match=f"no forward ended at row {row}"):
        _ = sent.unsent(2)


def test_the_oldest_blocks_go_first_and_later_ones_serve_those_who_hold_the_rest() -> None:
    sent = trail((0, 4), (4, 4), (8, 4), limit=8 * ROW)
    assert (sent.begins, spans(sent.after(0))) == (4, [(4, 4), (8, 4)])
    with pytest.raises(
        StateLost, match="rows from 3 on are lacking, and the trail begins at row 4"
    ):
        sent.want(3, 12, answer=False)
    sent.want(4, 12, answer=False)
    assert spans(sent.unsent(2)) == [(4, 4), (8, 4)]


def test_what_was_sent_is_remembered_while_old_blocks_go() -> None:
    sent = trail((0, 4), (4, 4), limit=8 * ROW)
    sent.want(0, 20, answer=False)
    assert spans(sent.unsent(2)) == [(0, 4), (4, 4)]
    sent.add(block(8, 4))
    assert spans(sent.unsent(2)) == [(8, 4)]


def test_rows_that_were_taken_back_are_sent_anew() -> None:
    sent = trail((0, 4), (4, 1))
    sent.want(0, 9, answer=False)
    _ = sent.unsent(2)
    sent.roll_back(4)
    sent.add(block(4, 2))
    assert spans(sent.unsent(2)) == [(4, 2)]


def test_of_a_block_that_was_taken_back_in_part_nothing_is_left() -> None:
    sent = trail((0, 4), (4, 3))
    sent.roll_back(5)
    assert (sent.begins, sent.after(0)) == (5, [])
