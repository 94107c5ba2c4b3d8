"""The order in which a stage computes what waits for it: rows of answers, chunks, words."""

import itertools
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from exo_node.proto import peer_pb2 as pb
from exo_node.shard.pipeline.frames import HiddenBlock
from exo_node.shard.pipeline.stage_queue import Kind, StageQueue, kind_of


class Stage:
    """A queue whose jobs write their names down."""

    def __init__(self) -> None:
        self.queue = StageQueue()
        self.log: list[str] = []
        self.dropped: list[str] = []

    def add(self, name: str, kind: Kind, *requests: str, attempt: int = 1) -> None:
        def drop() -> None:
            self.dropped.append(name)

        self.queue.add(requests, attempt, kind, lambda: self.log.append(name), drop)

    def run(self, count: int = 1000) -> str:
        """So many of them; all that were run so far."""
        for _ in range(count):
            if (job := self.queue.next()) is None:
                break
            job()
        return " ".join(self.log)


def test_rows_pass_the_chunks_that_wait() -> None:
    stage = Stage()
    for number in range(3):
        stage.add(f"P{number}", "chunk", "p")
    assert stage.run(1) == "P0"
    stage.add("a", "row", "a")
    stage.add("bc", "row", "b", "c")
    assert stage.run() == "P0 a bc P1 P2"


def test_a_prompt_has_its_turn_behind_one_row_of_each_answer() -> None:
    stage = Stage()
    stage.add("P0", "chunk", "p")
    stage.add("P1", "chunk", "p")
    for number in range(2):
        stage.add(f"a{number}", "row", "a")
        stage.add(f"b{number}", "row", "b")
    assert stage.run() == "a0 b0 P0 a1 b1 P1"


def test_answers_alone_have_no_turns_to_wait_for() -> None:
    stage = Stage()
    for number in range(3):
        stage.add(f"a{number}", "row", "a")
    assert stage.run() == "a0 a1 a2"


def test_what_is_of_one_request_keeps_its_order() -> None:
    stage = Stage()
    stage.add("P0", "chunk", "p")
    stage.add("release q", "word", "q")
    stage.add("back", "word", "p")
    stage.add("row of p", "row", "p")
    stage.add("P1", "chunk", "p")
    assert stage.run() == "release q P0 back row of p P1"


def test_a_word_does_not_overtake_a_row_that_waits_for_a_chunk() -> None:
    stage = Stage()
    stage.add("P", "chunk", "p")
    stage.add("a0", "row", "a")
    stage.add("a1", "row", "a")
    stage.add("release a", "word", "a")
    stage.add("release b", "word", "b")
    assert stage.run() == "a0 release b P a1 release a"


def test_a_request_that_is_over_has_no_chunk_computed() -> None:
    stage = Stage()
    for number in range(3):
        stage.add(f"P{number}", "chunk", "p")
        stage.add(f"Q{number}", "chunk", "q")
    assert stage.run(1) == "P0"
    assert stage.queue.drop("p", 1) == 2
    stage.add("release p", "word", "p")
    assert stage.run() == "P0 release p Q0 Q1 Q2"
    assert stage.dropped == ["P1", "P2"]


def test_the_next_attempts_chunks_stay() -> None:
    stage = Stage()
    stage.add("P2", "chunk", "p", attempt=2)
    assert stage.queue.drop("p", 1) == 0
    assert stage.run() == "P2"


def test_rows_of_answers_are_told_from_chunks() -> None:
    def block(reply: "pb.Reply.ValueType", rows: int = 1) -> HiddenBlock:
        return HiddenBlock("r", 1, 0, rows, (0,) * rows, reply, b"")

    assert kind_of(block(pb.REPLY_ALL)) == "row"
    assert kind_of(block(pb.REPLY_NONE)) == kind_of(block(pb.REPLY_LAST, 9)) == "chunk"


Arrivals = st.lists(
    st.tuples(st.sampled_from(["row", "chunk", "word", "run"]), st.sampled_from("abc")),
    max_size=40,
)


@given(Arrivals)
def test_whatever_comes_orders_are_kept_and_nobody_waits_for_two_chunks(
    arrivals: Iterable[tuple[str, str]],
) -> None:
    stage, came = Stage(), list[str]()
    waiting = dict[str, int]()
    """Of each row that is here and not behind a chunk of its own: the chunks since it came."""
    numbers = itertools.count()

    def step() -> None:
        before = len(stage.log)
        _ = stage.run(1)
        for name in stage.log[before:]:
            _ = waiting.pop(name, None)
            if "chunk" in name:
                for other in waiting:
                    waiting[other] += 1
        # One may be due before it, where the answer had its row already.
        first = {name[0]: count for name, count in reversed(waiting.items())}
        assert all(count <= 1 for count in first.values())

    for kind, request in arrivals:
        if kind == "run":
            step()
            continue
        name = f"{request} {kind} {next(numbers)}"
        stage.add(name, kind, request)  # pyright: ignore[reportArgumentType]
        came.append(name)
        alone = not any(n[0] == request and n not in stage.log for n in came[:-1])
        if kind == "row" and alone:
            waiting[name] = 0
    while len(stage.queue):
        step()
    assert sorted(stage.log) == sorted(came)
    for request in "abc":
        assert [n for n in stage.log if n[0] == request] == [n for n in came if n[0] == request]
