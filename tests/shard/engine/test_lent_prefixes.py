"""A conversation longer than half of the room finds its prefix, and the bytes keep their bound.

While a request runs, its rows are in its own caches only, and what is kept gets them at its end.
The model's numbers depend on how many rows a forward has: rows of another forward would show.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from engines import answer, engine_of, request
from held_prefixes import held_bytes, kept, lend_all, lent, nodes
from prefixes import CHUNK, KINDS, ROOM, SHORT, TOKENS, cold, engine, of_class, told, turn
from readers import Reader, loaded, together
from small import small_spec
from zoo import VOCABULARY

from exo_node.mtp.rollback import cache_arrays
from exo_node.shard.engine.engine import TextEngine
from exo_node.shard.engine.events import Delta, Done
from exo_node.shard.engine.request import EngineRequest
from exo_node.shard.pipeline.request_state import RequestState

CONTEXT = 1024
PLAIN = CONTEXT * 256 + 5 * 28_200
"""Bytes, as a plan has them: a context of the one layer of attention, and something for states."""
TIGHT = PLAIN + CONTEXT * 256 + 5 * 41_000
"""The same with the draft head and the hidden rows that it is yet to read at borders."""


LOGITS = 4 * 4096
"""Bytes: of the row that may be computed meanwhile."""


def room_of(k: int) -> int:
    return TIGHT if k else PLAIN


def tight(room: int = TIGHT, **changes: Any) -> TextEngine:
    return engine(room=room, context_length=CONTEXT, **changes)


def ask(prompt: list[int], k: int, tokens: int = TOKENS) -> EngineRequest:
    return request(prompt, k, tokens)


def drive(served: TextEngine, asked: EngineRequest, room: int = TIGHT) -> tuple[list[int], int]:
    """The ids and the cached tokens; whenever it lets others pass, bytes are within the room."""
    ids, cached = list[int](), -1
    for event in served.generate(asked):
        assert held_bytes(served) <= room
        if isinstance(event, Delta):
            ids += event.round.tokens
        elif isinstance(event, Done):
            cached = event.stats.cached_tokens
    assert served.cache_bytes() == 0 and not lent(served)
    assert held_bytes(served) <= room
    return ids, cached


@pytest.mark.parametrize(("rows", "k"), [(520, 0), (640, 1), (800, 2), (880, 3), (820, 0)])
def test_the_second_turn_of_a_long_conversation_reads_what_is_new(rows: int, k: int) -> None:
    warm, talk = tight(room_of(k)), turn(rows, rows)
    found, asked = list[int](), list[int]()
    for number in range(3):
        asked = [*talk, 7, 8]
        ids, cached = drive(warm, ask(asked, k), room_of(k))
        assert tuple(ids) == cold(asked, k)[0]
        found.append(cached)
        talk = [*asked, *ids, *turn(12, number)]
    assert found[0] == 0
    assert min(found[1:]) >= rows - CHUNK
    assert_as_cold(warm, asked, k)


def assert_as_cold(
    warm: TextEngine, prompt: list[int], k: int, cold_one: TextEngine | None = None
) -> None:
    """What it has of the prompt is, bit for bit, what reading it leaves."""
    asked, alone = request(prompt, k, 1), cold_one or engine()
    _ = answer(alone, asked)
    some, others = (each.prefix_of(asked) for each in (warm, alone))
    assert some is not None and others is not None and some.position == others.position
    mine, theirs = (_arrays(each) for each in (some, others))
    assert len(mine) == len(theirs) > 6
    assert all(mx.array_equal(a, b).item() for a, b in zip(mine, theirs, strict=True))


def _arrays(state: RequestState) -> list[mx.array]:
    drafter = state.drafter
    if drafter is None:
        return cache_arrays(state.caches)
    hiddens = [each for each in (drafter.read, drafter.pending) if each is not None]
    return [*cache_arrays(state.caches), *cache_arrays([drafter.cache]), *hiddens]


@pytest.fixture
def no_collection() -> Generator[None]:
    """Caches go as their answer ends, in cycles of objects or not."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.usefixtures("no_collection")
def test_rows_move_a_part_at_a_time(k: int) -> None:
    """MLX's own peak, as rows move to a request and back; logits and the like are not counted."""
    room, talk = room_of(k), turn(800, 3)
    warm, before = tight(room), 0

    def beside() -> int:
        """From here on the peak counts. Bytes that are neither kept nor a request's."""
        mx.synchronize()
        mx.reset_peak_memory()
        return mx.get_active_memory() - held_bytes(warm)

    others = beside()
    for number in range(3):
        asked = ask([*talk, 7, 8], k, 3)
        before = beside()
        assert before < others + 64_000
        events = warm.generate(asked)
        _ = next(events)
        assert number == 0 or mx.get_peak_memory() - before <= room + LOGITS
        assert bool(lent(warm)) == bool(number)
        for event in events:
            if isinstance(event, Done):
                before = beside()
                assert lent(warm)
        assert mx.get_peak_memory() - before <= room + LOGITS
        assert nodes(kept(warm)) and not lent(warm)
        talk = [*talk, 7, 8, *turn(12, 9)]


def started(
    served: TextEngine, asked: EngineRequest, tokens: int = 1
) -> Generator[object, None, None]:
    """An answer that goes on, behind so many rounds."""
    events = served.generate(asked)
    while tokens:
        tokens -= isinstance(next(events), Delta)
    return events


LONG = [*turn(700, 50), 7, 8]
NEXT = [*LONG, *turn(20, 51), 7, 8]
THREE = 3 * TIGHT
"""Room for three of them at once."""
BRANCH = [*LONG[:700], *turn(30, 52), 7, 8]


@pytest.mark.parametrize("k", [0, 2])
def test_others_read_the_rows_of_a_request_that_runs(k: int) -> None:
    """Lent ones too; and whoever of those that share them ends last gives them back."""
    warm = engine(room=THREE, batching=False)
    first = started(warm, ask(LONG, k, 40))
    assert lend_all(warm)
    second = warm.generate(ask(NEXT, k))
    ids = [t for event in second if isinstance(event, Delta) for t in event.round.tokens]
    assert tuple(ids) == cold(NEXT, k)[0]
    assert lent(warm), "the first still has them"
    _ = held_bytes(warm)
    third = started(warm, ask(BRANCH, k, 40))
    rest = list(first)
    assert isinstance(rest[-1], Done)
    _ = held_bytes(warm)
    rest = list(third)
    assert isinstance(rest[-1], Done) and not lent(warm)
    for asked in (NEXT, BRANCH):
        ids, cached = drive(warm, ask(asked, k), THREE)
        assert tuple(ids) == cold(asked, k)[0] and cached >= 640
        assert_as_cold(warm, asked, k)


@pytest.mark.parametrize("events", [2, 5, 9, 12, 17, 30])
def test_a_cancelled_request_leaves_what_is_known(events: int) -> None:
    warm = tight()
    steps = warm.generate(ask(LONG, 2, 60))
    for _ in range(events):
        _ = next(steps)
    known = max((node.end for node in nodes(kept(warm))), default=0)
    steps.close()
    assert warm.cache_bytes() == 0 and not lent(warm)
    assert held_bytes(warm) <= TIGHT
    ids, cached = drive(warm, ask(LONG, 2))
    assert tuple(ids) == cold(LONG, 2)[0]
    assert cached >= known


class Faults:
    """Of the engine's target: from now on each of its forwards fails, in a graph or at once."""

    def __init__(self, served: TextEngine) -> None:
        self._target: Any = served._target  # pyright: ignore[reportPrivateUsage]

    @contextmanager
    def __call__(self) -> Generator[None]:
        def fails(*_: object, **__: object) -> object:
            raise RuntimeError("out of memory")

        names = ("forward", "forward_batch", "hidden_batch")
        for name in names:
            setattr(self._target, name, fails)
        try:
            yield
        finally:
            for name in names:
                delattr(self._target, name)


@pytest.mark.parametrize(("k", "events"), [(0, 3), (0, 20), (3, 3), (3, 16)])
def test_rows_of_a_request_that_failed_are_not_kept(k: int, events: int) -> None:
    warm = tight()
    steps = warm.generate(ask(LONG, k, 60))
    for _ in range(events):
        _ = next(steps)
    had = {id(span) for span in lent(warm)}
    with pytest.raises(RuntimeError, match="out of memory"), Faults(warm)():
        _ = list(steps)
    assert warm.cache_bytes() == 0 and not lent(warm)
    assert not had & {id(span) for node in nodes(kept(warm)) for span in node.spans}
    _ = held_bytes(warm)
    answers = [drive(warm, ask(LONG, k)) for _ in range(2)]
    assert [tuple(ids) for ids, _ in answers] == [cold(LONG, k)[0]] * 2
    assert answers[1][1] >= 640


class AtItsEnd(Reader):
    """It takes its last round only when its rows are gone from the batch."""

    served: TextEngine | None = None
    waited = False

    @property
    def stalls(self) -> "AtItsEnd":  # pyright: ignore[reportIncompatibleVariableOverride]
        return self

    @stalls.setter
    def stalls(self, _: object) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Not as it was made."""

    def __contains__(self, turn: object) -> bool:
        batching: Any = self.served._batching if self.served else None  # pyright: ignore[reportPrivateUsage]
        members: list[Any] = [] if batching is None else batching._batch._members
        own = any(m.over and m.answer._max_tokens == self.asked.max_tokens for m in members)
        self.waited |= own
        return own


@pytest.mark.parametrize("reader", [Reader, AtItsEnd])
def test_an_answer_that_ends_in_a_batch_gives_its_rows_back(reader: type[Reader]) -> None:
    """As it goes, or before the batch goes on without it."""
    warm = engine_in_batches()
    prompts = [[*turn(rows, 70 + rows), 7, 8] for rows in (420, 400, 410)]
    first, last = ask(prompts[0], 2, 90), ask(prompts[2], 1, 90)
    ends = reader(request(prompts[1], 2, 25, ignore_end=True))
    if isinstance(ends, AtItsEnd):
        ends.served = warm
    ended = list[int]()

    def lend(number: int) -> None:
        if number % 7 == 3 and not ended:
            _ = lend_all(warm)
        if ends.done is not None and not ended:
            ended.append(warm.prefix_of(ends.asked).position)  # pyright: ignore[reportOptionalMemberAccess]
        _ = held_bytes(warm)

    together(warm, [Reader(first), ends, Reader(last)], lend)
    assert not lent(warm) and warm.cache_bytes() == 0
    assert ends.rounds[-1].forward.batch == 3
    assert not isinstance(ends, AtItsEnd) or ends.waited
    assert ended == [320]
    for prompt in prompts:
        assert_as_cold(warm, prompt, 1, engine_in_batches())


def engine_in_batches() -> TextEngine:
    wanted = small_spec(native_mtp=True, prefill_chunk=CHUNK, prefix_cache_bytes=2 * THREE)
    served = engine_of(loaded(), wanted)
    served.batch_identity = "bitwise"  # as `probe` finds: prompts are read together, too
    return served


@pytest.mark.parametrize("ends", [7, None])
def test_rounds_that_run_ahead_give_their_rows_back(ends: int | None) -> None:
    wanted = small_spec(native_mtp=True, prefill_chunk=CHUNK, prefix_cache_bytes=TIGHT)
    warm = engine_of(loaded(), wanted, runs_ahead=True)
    steps = started(warm, request(LONG, 2, 40, ignore_end=True), 4)
    assert lend_all(warm)
    attempt: Any = next(iter(warm._live._live.values()))  # pyright: ignore[reportPrivateUsage]
    assert attempt.generation.runs_ahead
    if ends is None:
        _ = list(steps)
    steps.close()
    assert not lent(warm) and warm.cache_bytes() == 0
    got, alone = (answer(each, request(NEXT, 2, 9)) for each in (warm, engine_of(loaded(), wanted)))
    assert got.ids == alone.ids and got.stats.cached_tokens >= 640
    assert [r.accepted for r in got.rounds] == [r.accepted for r in alone.rounds]


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_cache_lend_what_has_rows(kind: str) -> None:
    ids = [(37 * i + 11) % (VOCABULARY - 1) + 1 for i in range(224)]
    warm, alone = of_class(kind, ROOM), of_class(kind, ROOM)
    steps = started(warm, request([*ids, 5], 0, TOKENS))
    rows = sum(span.bytes for node in nodes(kept(warm)) for span in node.spans)
    assert bool(lend_all(warm)) == bool(rows)
    _ = list(steps)
    assert not lent(warm)
    _ = held_bytes(warm)
    asked = [*ids, 5, 9, 7]
    got, wanted = (answer(each, request(asked, 0, TOKENS)) for each in (warm, alone))
    assert told(got) == told(wanted)
    assert got.stats.cached_tokens == 3 * SHORT
