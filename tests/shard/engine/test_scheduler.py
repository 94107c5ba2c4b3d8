"""The scheduler by tables and in virtual time: who runs next, and for how long."""

from dataclasses import dataclass
from typing import Any, cast

import pytest
from engines import request as answer_request

from exo_node.shard.engine.request import MAX_UNREAD_EVENTS, Phase, Request
from exo_node.shard.engine.scheduler import (
    ALONE_DEPTH,
    GROWTH,
    ContinuePrefill,
    Decode,
    Flight,
    Prefill,
    Replay,
    Scheduler,
)

CONTEXT, CHUNK = 4096, 256
NO_SAMPLER = cast("Any", None)
"""The scheduler never looks at it."""


def request(
    phase: Phase = "decode", rows: int = 10, prompt: int = 0, ends: int = 0, **fields: Any
) -> Request:
    """With `rows` rows in its caches; of `prompt` rows, read by forwards of `ends` rows."""
    rows_of_prompt = prompt or max(rows, 1)
    step = ends or rows_of_prompt
    borders = [*range(step, rows_of_prompt, step), rows_of_prompt]
    sharing = {name: fields.pop(name) for name in ("cache_salt", "background") if name in fields}
    k = fields.pop("k", 0)
    parameters = answer_request([1] * rows_of_prompt, k, 1000, **sharing)
    new_request = Request(parameters, borders, NO_SAMPLER, NO_SAMPLER, **fields)
    new_request.phase, new_request.rows = phase, rows
    return new_request


def reader(prompt: int = 1024, rows: int = 0, **fields: Any) -> Request:
    """A request whose prompt is being read, by forwards of CHUNK rows."""
    return request("prefill", rows, prompt, CHUNK, **fields)


@dataclass(slots=True, eq=False)
class InFlight(Flight):
    """A piece of work that other nodes have."""

    is_of_a_prompt: bool = False

    @property
    def is_away(self) -> bool:
        return True

    @property
    def is_chunk(self) -> bool:
        return self.is_of_a_prompt


def scheduler(depth: int = 1) -> Scheduler:
    return Scheduler(CONTEXT, CHUNK, depth=depth)


@pytest.mark.parametrize(
    ("waiting", "running", "begin"),
    [
        ([100, 100], [], [0, 1]),
        ([CONTEXT, 100], [], [0]),
        ([2 * CONTEXT], [], [0]),
        ([100], [CONTEXT], []),
        ([CONTEXT - GROWTH, 10], [GROWTH], []),
        ([100, CONTEXT, 10], [10], [0]),
    ],
    ids=["both fit", "in order", "one always fits", "no room", "none passes", "behind the first"],
)
def test_requests_begin_in_order_while_their_rows_fit(
    waiting: list[int], running: list[int], begin: list[int]
) -> None:
    requests = [request("waiting", 0, rows) for rows in waiting]
    live = [request("decode", rows, rows) for rows in running]
    assert scheduler().admit([*live, *requests]) == [requests[i] for i in begin]


def waiting(prompt: int = 100, ends: int = 40, **fields: Any) -> Request:
    return request("waiting", 0, prompt, ends, **fields)


def test_a_request_waits_for_the_one_that_reads_its_prompt_and_keeps_no_other_waiting() -> None:
    first, second, third = (waiting() for _ in range(3))
    other = waiting(prompt=90)
    scheduler = Scheduler(CONTEXT, CHUNK)
    assert scheduler.admit([first, second, other, third]) == [first, other]
    first.phase = "prefill"
    assert scheduler.admit([first, second, third]) == []
    first.phase = "decode"
    assert scheduler.admit([first, second, third]) == [second]
    first.phase = "finished"
    assert scheduler.admit([first, third]) == [third]


@pytest.mark.parametrize(
    ("reading", "fields"),
    [
        ({}, {"cache_salt": b"another"}),
        ({"uses_cache": False}, {}),
        ({}, {"uses_cache": False}),
        ({"ends": 100}, {"ends": 100}),
        ({}, {"k": 3}),
        ({"background": True}, {}),
    ],
    ids=["salt", "not-kept", "not-found", "one-forward", "draft-state", "background"],
)
def test_a_request_does_not_wait_for_a_prefix_that_it_could_not_use(
    reading: dict[str, Any], fields: dict[str, Any]
) -> None:
    first, second = waiting(**reading), waiting(**fields)
    first.phase = "prefill"
    assert Scheduler(CONTEXT, CHUNK).admit([first, second]) == [second]


def test_background_requests_begin_behind_the_others() -> None:
    requests = [request("waiting", 0, 10, background=i == 0) for i in range(3)]
    assert scheduler().admit(requests) == [requests[1], requests[2], requests[0]]


def share_of_answers(chunk_s: float, round_s: float, answers: int, readers: int) -> float:
    """The share of the time that answers have while prompts are read without an end."""
    sched = scheduler()
    live = [request() for _ in range(answers)]
    live += [reader(10**6) for _ in range(readers)]
    spent = {True: 0.0, False: 0.0}
    for _ in range(2000):
        step = sched.plan(live, [], in_prefill=False)
        reads = not isinstance(step, Decode)
        if isinstance(step, Prefill):
            for each in step.requests:
                each.rows = each.next_end
        seconds = chunk_s if reads else round_s
        spent[reads] += seconds
        sched.charge(seconds, for_prefill=reads)
    return spent[False] / sum(spent.values())


@pytest.mark.parametrize("answers", [1, 5])
@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("chunk_s", [0.01, 0.3, 2.0])
def test_answers_keep_half_of_the_time_beside_prompts(
    chunk_s: float, readers: int, answers: int
) -> None:
    share = share_of_answers(chunk_s, 0.1, answers, readers)
    assert share >= 0.495, "but for the last chunk"
    assert share <= max(0.51, 0.1 / (0.1 + chunk_s) + 0.01), "prompts are read as well"


def test_parts_of_a_forward_are_not_interrupted_by_another_prompt() -> None:
    sched, live = scheduler(), [reader(), reader(), request()]
    first = sched.plan(live, [], in_prefill=False)
    assert isinstance(first, Prefill | Decode)
    kinds = list[type]()
    for _ in range(6):
        step = sched.plan(live, [], in_prefill=True)
        kinds.append(type(step))
        sched.charge(0.1, for_prefill=not isinstance(step, Decode))
    assert set(kinds) == {ContinuePrefill, Decode}


def test_prompts_are_read_in_turn_and_the_background_last() -> None:
    sched = scheduler()
    slow, one, other = reader(background=True), reader(), reader()
    order = list[Request]()
    for _ in range(12):
        step = sched.plan([slow, one, other], [], in_prefill=False)
        assert isinstance(step, Prefill)
        (each,) = step.requests
        order.append(each)
        each.rows = each.next_end
        if each.rows == len(each.prompt):
            each.phase = "finished"
    assert order == [one, other] * 4 + [slow] * 4


def test_a_log_is_rebuilt_between_rounds() -> None:
    sched, live = scheduler(), [request("replay", 5, turn=0), request()]
    kinds = {type(sched.plan(live, [], in_prefill=False)) for _ in range(2)}
    assert Replay in kinds


@pytest.mark.parametrize(
    ("rows", "starts", "together"),
    [
        ([64, 64, 64, 64], [0, 0, 0, 0], 4),
        ([64, 64, 64, 64, 64], [0, 0, 0, 0, 0], 4),
        ([200, 64], [0, 0], 1),
        ([64, 64], [0, 32], 1),
        ([96, 96], [32, 32], 2),
    ],
    ids=["fit", "one too many", "too wide", "another beginning", "both go on"],
)
def test_prompts_share_a_forward_of_a_chunks_rows(
    rows: list[int], starts: list[int], together: int
) -> None:
    live = [reader(n, at, batches_prompt=True) for n, at in zip(rows, starts, strict=True)]
    step = scheduler().plan(live, [], in_prefill=False)
    assert isinstance(step, Prefill) and len(step.requests) == together
    live = [reader(n, at) for n, at in zip(rows, starts, strict=True)]
    alone = scheduler().plan(live, [], in_prefill=False)
    assert isinstance(alone, Prefill) and len(alone.requests) == 1


def test_a_request_that_is_alone_shares_neither_prompt_nor_round() -> None:
    sched, fields = scheduler(), {"batches_prompt": True}
    live = [reader(64, batching_reason="a test", **fields), reader(64, **fields)]
    step = sched.plan(live, [], in_prefill=False)
    assert isinstance(step, Prefill) and len(step.requests) == 1
    live = [request(batching_reason="a test"), request(), request()]
    groups = {sched.plan(live, [], in_prefill=False) for _ in range(2)}
    assert groups == {Decode((live[0],)), Decode((live[1], live[2]))}


def test_long_and_short_requests_have_batches_of_their_own() -> None:
    sched, live = scheduler(), [request(rows=rows) for rows in (10, 20, 3000, 3100, 30)]
    steps = [sched.plan(live, [], in_prefill=False) for _ in range(2)]
    assert {len(step.requests) for step in steps if isinstance(step, Decode)} == {2, 3}
    live[0].rows = live[1].rows = live[4].rows = 2900  # they have grown
    step = sched.plan(live, [], in_prefill=False)
    assert isinstance(step, Decode) and set(step.requests) == set(live)


def test_groups_have_rounds_in_turn() -> None:
    sched, live = scheduler(), [request(rows=rows) for rows in (10, 20, 3000)]
    live.append(request(batching_reason="a test"))
    first = [sched.plan(live, [], in_prefill=False) for _ in range(3)]
    assert len({step.requests for step in first if isinstance(step, Decode)}) == 3
    assert [sched.plan(live, [], in_prefill=False) for _ in range(3)] == first


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_rounds_are_in_flight_than_the_depth(depth: int) -> None:
    live = [request(), request()]
    sched, flights = scheduler(depth), list[Flight]()
    while (step := sched.plan(live, flights, in_prefill=False)) is not None:
        assert isinstance(step, Decode)
        flights.append(Flight(step.requests, may_be_followed=True))
    assert len(flights) == depth
    single, flights = [request()], list[Flight]()
    while (step := sched.plan(single, flights, in_prefill=False)) is not None:
        assert isinstance(step, Decode)
        flights.append(Flight(step.requests, may_be_followed=True))
    assert len(flights) == ALONE_DEPTH


def test_a_round_that_must_be_read_first_is_not_followed() -> None:
    live = [request()]
    sched = scheduler(depth=2)
    assert sched.plan(live, [Flight((live[0],))], in_prefill=False) is None


@pytest.mark.parametrize("change", ["joins", "ends", "pauses", "has no room"])
def test_members_change_only_when_nothing_of_theirs_is_in_flight(change: str) -> None:
    live = [request(), request()]
    sched, flight = scheduler(depth=3), Flight(tuple(live), may_be_followed=True)
    assert sched.plan(live, [flight], in_prefill=False) == Decode(tuple(live))
    match change:
        case "joins":
            live.append(request())
        case "ends":
            live.pop().phase = "finished"
        case "pauses":
            live[0].events_delivered = MAX_UNREAD_EVENTS
        case _:
            live[0].emitted_tokens = live[0].max_tokens
    assert sched.plan(live, [flight], in_prefill=False) is None
    step = sched.plan(live, [], in_prefill=False)
    able = [r for r in live if not r.is_paused and r.remaining_tokens]
    assert isinstance(step, Decode) and set(step.requests) == set(able)


def test_a_paused_request_waits_for_its_reader() -> None:
    live = [request()]
    live[0].events_delivered, live[0].events_read = MAX_UNREAD_EVENTS + 3, 3
    assert scheduler().plan(live, [], in_prefill=False) is None
    live[0].events_read += 1
    assert scheduler().plan(live, [], in_prefill=False) == Decode((live[0],))


def test_tokens_in_flight_are_handed_out_before_a_prompt_is_read() -> None:
    live, sched = [request(), reader()], scheduler(depth=2)
    sched.charge(1.0, for_prefill=False)
    live[0].turn = 10**6
    assert sched.plan(live, [Flight((live[0],), may_be_followed=True)], in_prefill=False) is None
    assert isinstance(sched.plan(live, [], in_prefill=False), Prefill)


# ---- over stages


def chunk(of: Request) -> Flight:
    """A chunk of a prompt, on its way."""
    return InFlight((of,), is_of_a_prompt=True, may_be_followed=True)


def over(stages: int) -> Scheduler:
    """The scheduler of a model that is split over so many stages."""
    return Scheduler(CONTEXT, CHUNK, stages=stages)


def rounds(sched: Scheduler, live: list[Request], flights: list[Flight]) -> list[set[int]]:
    """Rounds until none may follow, by the places of their requests; they are away then."""
    groups = list[set[int]]()
    while isinstance(step := sched.plan(live, flights, in_prefill=False), Decode):
        flights.append(InFlight(step.requests))
        groups.append({live.index(each) for each in step.requests})
    assert step is None
    return groups


@pytest.mark.parametrize(
    ("stages", "answers", "sizes"),
    [
        (2, 1, [1]),
        (2, 2, [1, 1]),
        (2, 3, [1, 2]),
        (2, 4, [2, 2]),
        (3, 3, [1, 1, 1]),
        (3, 4, [1, 1, 2]),
        (3, 7, [2, 2, 3]),
        (2, 32, [16, 16]),
        (2, 40, [8, 16, 16]),
    ],
)
def test_as_many_groups_as_stages_keep_all_of_them_busy(
    stages: int, answers: int, sizes: list[int]
) -> None:
    groups = rounds(over(stages), [request() for _ in range(answers)], [])
    assert sorted(map(len, groups)) == sizes
    assert sorted(number for each in groups for number in each) == list(range(answers))


def test_groups_stay_as_they_are_while_answers_come() -> None:
    sched, live = over(2), [request(), request()]
    first = rounds(sched, live, [])
    assert first == [{0}, {1}]
    live.append(request())
    assert sorted(map(sorted, rounds(sched, live, []))) == [[0, 2], [1]]
    live.append(request())
    assert sorted(map(sorted, rounds(sched, live, []))) == [[0, 2], [1, 3]]


def test_a_group_of_too_many_is_parted_when_others_end() -> None:
    sched, live = over(2), [request() for _ in range(4)]
    assert sorted(map(sorted, rounds(sched, live, []))) == [[0, 2], [1, 3]]
    live[1].phase = live[3].phase = "finished"
    assert sorted(map(sorted, rounds(sched, live, []))) == [[0], [2]]


def test_a_member_joins_after_the_round_in_flight() -> None:
    sched, live, flights = over(2), [request(), request()], list[Flight]()
    _ = rounds(sched, live, flights)
    live.append(request())
    assert rounds(sched, live, flights) == []
    flights.pop(0)
    assert rounds(sched, live, flights) == [{0, 2}]


def test_as_many_chunks_as_keep_all_stages_busy_are_under_way() -> None:
    sched, live, flights = over(2), [reader(), reader()], list[Flight]()
    whose = list[int]()
    while isinstance(step := sched.plan(live, flights, in_prefill=False), Prefill):
        (each,) = step.requests
        whose.append(live.index(each))
        flights.append(chunk(each))
    assert step is None and whose == [0, 1, 0], "one more than stages, in turn"
    flights.pop(0)
    assert isinstance(sched.plan(live, flights, in_prefill=False), Prefill)


def test_a_forward_that_was_begun_here_continues_whatever_is_under_way() -> None:
    live = [reader()]
    flights = [chunk(live[0]) for _ in range(3)]
    assert over(2).plan(live, flights, in_prefill=True) == ContinuePrefill()


@pytest.mark.parametrize("what", ["a question for prefixes", "the end of its prompt"])
def test_a_prompt_waits_for_what_is_in_flight(what: str) -> None:
    waiting = reader(rows=1024 if what == "the end of its prompt" else 0)
    assert over(2).plan([waiting], [InFlight((waiting,))], in_prefill=False) is None
    other = reader()
    assert over(2).plan([waiting, other], [InFlight((waiting,))], in_prefill=False) == Prefill(
        (other,), (other.next_end,)
    )


def test_rounds_that_are_away_hold_up_no_prompt() -> None:
    sched, live = over(2), [request(), reader()]
    sched.charge(100.0, for_prefill=True)
    assert isinstance(sched.plan(live, [InFlight((live[0],))], in_prefill=False), Prefill)
    # It is back: it was owed nothing while it could not have had it, and has one round.
    assert sched.plan(live, [], in_prefill=False) == Decode((live[0],))
    live[0].turn = 10**6
    assert isinstance(sched.plan(live, [], in_prefill=False), Prefill)
