"""The order in which a stage computes what waits for it: rounds of answers, chunks, words."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from exo_node.shard.pipeline.stage_queue import StageQueue


class Stage:
    """A queue whose jobs write their names down."""

    def __init__(self) -> None:
        self.queue = StageQueue()
        self.log: list[str] = []
        self.dropped: list[str] = []

    def round(self, name: str, *requests: str) -> None:
        """No members: a message without a forward, such as a release."""
        keys = [(request, 1) for request in requests]
        self.queue.add_round(keys, lambda: self.log.append(name))

    def chunk(self, name: str, request: str, attempt: int = 1) -> None:
        self.queue.add_chunk(
            (request, attempt),
            lambda: self.log.append(name),
            lambda: self.dropped.append(name),
        )

    def run(self, count: int = 1000) -> str:
        """So many of them; all that were run so far."""
        for _ in range(count):
            if (job := self.queue.next()) is None:
                break
            job()
        return " ".join(self.log)


def test_a_word_overtakes_no_round_and_does_not_wait_for_chunks() -> None:
    stage = Stage()
    stage.chunk("P", "p")
    stage.round("release p")
    stage.round("a0", "a")
    stage.round("a1", "a")
    stage.round("release a")
    stage.round("release b")
    assert stage.run() == "release p a0 P a1 release a release b"


def test_a_request_that_is_over_has_no_chunk_computed() -> None:
    stage = Stage()
    for number in range(3):
        stage.chunk(f"P{number}", "p")
        stage.chunk(f"Q{number}", "q")
    assert stage.run(1) == "P0"
    assert stage.queue.drop("p", 1) == 2
    stage.round("release p")
    assert len(stage.queue) == 4
    assert stage.run() == "P0 release p Q0 Q1 Q2"
    assert stage.dropped == ["P1", "P2"]


def test_rounds_of_a_request_that_is_over_stay_for_the_others_that_share_them() -> None:
    stage = Stage()
    stage.round("ab", "a", "b")
    stage.chunk("A", "a")
    assert stage.queue.drop("a", 1) == 1
    assert stage.run() == "ab"
    assert stage.dropped == ["A"]


def test_the_chunks_of_earlier_attempts_go_and_those_of_the_next_stay() -> None:
    stage = Stage()
    for attempt in (1, 2, 3):
        stage.chunk(f"P{attempt}", "p", attempt)
    assert stage.queue.drop("p", 2) == 2
    assert stage.dropped == ["P1", "P2"]
    assert stage.run() == "P3"


Members = st.sets(st.sampled_from("abc"), min_size=1).map(lambda names: sorted(names))
Arrivals = st.lists(
    st.one_of(
        st.tuples(st.just("round"), Members),
        st.tuples(st.just("chunk"), st.sampled_from(["p", "q"]).map(lambda name: [name])),
        st.tuples(st.sampled_from(["word", "run"]), st.just(list[str]())),
    ),
    max_size=40,
)


@given(Arrivals)
def test_whatever_comes_orders_are_kept_and_nobody_waits_for_two_chunks(
    arrivals: Iterable[tuple[str, Sequence[str]]],
) -> None:
    """Sends like the first stage: the next round of a request when its last one is back."""
    stage, came = Stage(), list[str]()
    here = dict[str, Sequence[str]]()
    """Whose the rounds are that were not run."""
    waited, chunks_in_a_row = Counter[str](), 0
    """The chunks since each of them came."""
    numbers = itertools.count()

    def step() -> None:
        nonlocal chunks_in_a_row
        before = len(stage.log)
        _ = stage.run(1)
        for name in stage.log[before:]:
            _ = here.pop(name, None)
            is_chunk = name.startswith("chunk")
            if is_chunk:
                waited.update(here.keys())
            chunks_in_a_row = chunks_in_a_row + 1 if is_chunk and here else 0
            assert chunks_in_a_row <= 1
        assert all(waited[name] <= 1 for name in here)

    for kind, requests in arrivals:
        if kind == "run":
            step()
            continue
        name = f"{kind} {next(numbers)}"
        if kind == "chunk":
            stage.chunk(name, requests[0])
        elif kind == "word":
            stage.round(name)
        else:
            if any(not set(requests).isdisjoint(others) for others in here.values()):
                continue
            stage.round(name, *requests)
            here[name] = requests
        came.append(name)
    while len(stage.queue):
        step()
    assert sorted(stage.log) == sorted(came)

    def of(names: Iterable[str], *kinds: str) -> list[str]:
        return [name for name in names if name.split()[0] in kinds]

    assert of(stage.log, "chunk") == of(came, "chunk")
    assert of(stage.log, "round", "word") == of(came, "round", "word")


@given(st.lists(st.sampled_from(["add", "run"]), max_size=60))
def test_prompts_continue_however_many_rounds_come(events: Iterable[str]) -> None:
    """Answers whose next row is here as soon as the last one was computed leave them a turn."""
    stage = Stage()
    for number in range(20):
        stage.chunk(f"P{number}", "p")
    stage.round("a", "a")
    stage.round("bc", "b", "c")
    for event in events:
        before = len(stage.log)
        if event == "run":
            _ = stage.run(1)
        for name in stage.log[before:]:
            if name in ("a", "bc"):
                stage.round(name, *name)
    turns = [
        (is_round, len(list(names))) for is_round, names in itertools.groupby(stage.log, _is_round)
    ]
    assert all(length <= (2 if is_round else 1) for is_round, length in turns)


def _is_round(name: str) -> bool:
    return not name.startswith("P")
