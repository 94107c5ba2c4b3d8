"""Plain steps that answers show: which count, and what does not move their median."""

from driven import driven
from engines import STORY, answer, request
from hypothesis import given
from hypothesis import strategies as st
from pipelines import pipeline_of
from readers import Reader, engine, prompt

from exo_node.shard.engine.step_times import ENOUGH, SHORT_ROWS, StepTimes

A, B = object(), object()
_SECONDS = st.floats(1e-6, 100)


def read_all(times: StepTimes, request: object, steps: list[float], *, plain: bool = True) -> None:
    """Reads a first step, then one after each of `steps` seconds."""
    now = 1000.0
    for rows, step in enumerate([0.0, *steps]):
        now += step
        times.read(request, rows, now, is_plain=plain)


def test_an_answer_shows_the_median_of_its_steps_when_it_ends() -> None:
    times = StepTimes()
    read_all(times, A, [0.25, 0.5, 8.0, 0.5, 0.5])
    assert (times.seconds, times.answers) == (0.0, 0)
    times.end(A)
    assert (times.seconds, times.answers) == (0.5, 1)
    times.end(A)
    assert times.answers == 1


@given(st.lists(_SECONDS, max_size=ENOUGH - 1))
def test_a_short_answer_shows_nothing(steps: list[float]) -> None:
    times = StepTimes()
    read_all(times, A, steps)
    times.end(A)
    assert times.answers == 0


@given(_SECONDS, st.lists(st.floats(0, 1e5), max_size=4))
def test_pauses_that_are_fewer_than_steps_show_nowhere(step: float, pauses: list[float]) -> None:
    times = StepTimes()
    for seconds in [*[step] * (len(pauses) + ENOUGH), *(step + pause for pause in pauses)]:
        times.add(A, 1, seconds)
    times.end(A)
    assert times.seconds == step


def test_drafted_and_shared_steps_show_nothing_and_neither_does_the_one_after() -> None:
    times = StepTimes()
    read_all(times, A, [0.5] * 9, plain=False)
    for now in range(20):  # each plain step comes after another kind
        times.read(A, 1, float(now), is_plain=now % 2 == 0)
    times.end(A)
    assert times.answers == 0


def test_steps_of_two_answers_in_turn_are_not_taken_for_steps_of_one() -> None:
    times = StepTimes()
    for now in range(40):
        times.read((A, B)[now % 2], 1, float(now), is_plain=True)
    times.end(A)
    times.end(B)
    assert times.answers == 0


def test_a_step_in_a_long_context_does_not_count() -> None:
    times = StepTimes()
    for _ in range(ENOUGH):
        times.add(A, SHORT_ROWS, 0.5)
    for _ in range(9 * ENOUGH):
        times.add(A, SHORT_ROWS + 1, 8.0)
    times.end(A)
    assert (times.seconds, times.answers) == (0.5, 1)


def test_the_next_answer_ends_one_that_was_never_ended() -> None:
    times = StepTimes()
    read_all(times, A, [0.5] * ENOUGH)
    read_all(times, B, [0.25] * ENOUGH)
    assert (times.seconds, times.answers) == (0.5, 1)
    times.end(B)
    assert (times.seconds, times.answers) == (0.25, 2)


def test_an_answer_that_drafted_counts_by_what_its_rounds_let_expect() -> None:
    times = StepTimes()
    read_all(times, A, [0.5] * (ENOUGH - 1))
    times.estimate(A, 0.25)
    times.end(A)
    assert (times.seconds, times.answers) == (0.25, 1)
    read_all(times, B, [0.5] * ENOUGH)
    times.estimate(B, 0.25)
    times.end(B)
    assert (times.seconds, times.answers) == (0.5, 2), "its own steps come first"
    times.estimate(A, None)
    times.end(A)
    assert times.answers == 2


def test_of_real_answers_only_those_that_were_alone_and_did_not_draft_show_steps() -> None:
    served = engine(runs_ahead=False)

    def reports(*readers: Reader) -> int:
        before = served.step_times.answers
        driven(served, readers)
        return served.step_times.answers - before

    def reader(number: int, k: int = 0, begins: int = 0) -> Reader:
        return Reader(request(prompt(number, 5), k, 3 * ENOUGH), begins, None, range(0))

    assert reports(reader(1)) == 1
    assert 0 < served.step_times.seconds < 60
    assert reports(reader(2), reader(3)) == 0, "their forwards were shared"
    assert reports(reader(4, k=2)) == 0
    assert reports(reader(5)) == 1


def test_each_stage_of_a_split_model_shows_its_own_steps() -> None:
    pipeline = pipeline_of([0, 15, 16])
    _ = answer(pipeline.engine, request(STORY["prompt_ids"], max_tokens=3 * ENOUGH))
    shown = [each.step_times for each in (pipeline.engine, *pipeline.workers)]
    assert [times.answers for times in shown] == [1, 1]
    assert all(0 < times.seconds < 60 for times in shown)
