"""A draft head reads nothing while drafts do not pay for those that are answered together."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from budget import seeds
from driven import driven
from engines import changed, engine_of, request
from held_prefixes import cache_of, counted, nodes
from mlx_lm.models.cache import KVCache
from readers import Reader, alone, loaded, prompt
from small import small_spec

from exo_node.mtp.drafting.acceptance import Acceptance, Prior
from exo_node.mtp.drafting.round_policy import DraftDemand, Offer, RoundPolicy
from exo_node.mtp.seams import Want
from exo_node.mtp.targets import FamilyTarget
from exo_node.shard.engine import prefill_forward
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.drafter import Drafter
from exo_node.shard.engine.request import Parameters

TOKENS = 30
CHEAP, DEAR = 0.05, 3.0


@dataclass
class Bench:
    """A clock that forwards move, and what the head reads. `row`: seconds of a row more of a verify
    of several requests, of which the first row takes one second."""

    row: float = DEAR
    now: float = 0.0
    passes: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def clock(self) -> float:
        return self.now

    @property
    def rows_read(self) -> int:
        return sum(size * rows for size, rows in self.passes)


class WatchedHead:
    """The small model's, whose passes are noted."""

    hidden_kind = "post_norm"
    make_cache = KVCache

    def __init__(self, bench: Bench) -> None:
        self._head: Any = loaded().head
        self._bench = bench

    def __call__(self, hidden: mx.array, embedding: mx.array, cache: Any) -> mx.array:
        self._bench.passes.append((hidden.shape[0], hidden.shape[1]))
        return self._head(hidden, embedding, cache)

    def read_out(self, output: mx.array) -> mx.array:
        return self._head.read_out(output)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    head_bench = Bench()
    together_, single = FamilyTarget.forward_batch, FamilyTarget.forward

    def forward_batch(self: FamilyTarget, tokens: mx.array, caches: Any) -> Any:
        head_bench.now += 1 + (tokens.shape[1] - 1) * (
            head_bench.row if tokens.shape[0] > 2 else CHEAP
        )
        return together_(self, tokens, caches)

    def forward(self: FamilyTarget, tokens: mx.array, caches: Any, *, want: Want, **_: Any) -> Any:
        head_bench.now += 1 + (tokens.shape[0] - 1) * CHEAP
        return single(self, tokens, caches, want=want)

    monkeypatch.setattr(FamilyTarget, "forward_batch", forward_batch)
    monkeypatch.setattr(FamilyTarget, "forward", forward)
    for least in ("MIN_PART_S", "MAX_PART_S"):  # a chunk is computed at once
        monkeypatch.setattr(prefill_forward, least, math.inf)
    return head_bench


def watched(bench: Bench, *, ahead: bool | None = None, **changes: Any) -> TextEngine:
    spec = small_spec(native_mtp=True, prefill_chunk=160, **changes)
    model = replace(loaded(), head=WatchedHead(bench))
    served = engine_of(model, spec, clock=bench.clock, runs_ahead=ahead)
    served.measurements.batch_identity = "bitwise"
    served.measurements.shares_prompts = True
    return served


def default(ids: list[int], tokens: int = TOKENS, k: int = 2) -> Parameters:
    return request(ids, k, tokens, adaptive_draft=True, ignore_eos=True)


def crowd(count: int, rows: int = 0, first: int = 0, tokens: int = TOKENS) -> list[Reader]:
    return [Reader(default(prompt(first + i, rows), tokens)) for i in range(count)]


def taught(bench: Bench, **changes: Any) -> TextEngine:
    """An engine that knows what rounds cost: so many were answered together before."""
    served = watched(bench, **changes)
    driven(served, crowd(4, 20, 100))
    bench.passes.clear()
    return served


def assert_as_alone(readers: list[Reader]) -> None:
    for reader in readers:
        expected = alone(
            changed(reader.request, num_draft_tokens=0, adaptive_draft=False, name="alone")
        )
        assert reader.fault is None and tuple(reader.ids) == expected.ids


def test_neither_prompts_nor_answers_are_read_while_drafts_do_not_pay(bench: Bench) -> None:
    served, readers = taught(bench), crowd(4, 200)
    before_end = list[int]()

    def noted(_: int) -> None:
        if all(reader.end is None for reader in readers):
            before_end.append(bench.rows_read)

    driven(served, readers, noted)
    assert before_end and set(before_end) == {0}
    assert {r.drafted for each in readers for r in each.rounds if r.forward.batch == 4} == {0}
    assert_as_alone(readers)
    for reader in readers:
        assert reader.end is not None
        stats = reader.end.stats
        assert (stats.drafter_kind, stats.num_draft_tokens) == ("native_mtp", 2)
        assert stats.draft_k_histogram[0] >= TOKENS - 10


def test_first_rounds_of_members_and_of_depths_teach_no_costs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels may be compiled in them."""
    learned, played = list[int](), list[tuple[int, int]]()
    plain_learn, plain_choose = RoundPolicy.learn, RoundPolicy.choose

    def learn(self: RoundPolicy, size: int, *rest: Any) -> None:
        learned.append(size)
        plain_learn(self, size, *rest)

    def choose(self: RoundPolicy, offers: Sequence[Offer], *rest: Any, **options: Any) -> Any:
        choice = plain_choose(self, offers, *rest, **options)
        played.append((len(offers), choice.width))
        return choice

    monkeypatch.setattr(RoundPolicy, "learn", learn)
    monkeypatch.setattr(RoundPolicy, "choose", choose)
    readers = crowd(4, 20)
    readers[0] = Reader(default(prompt(0, 20), TOKENS // 2))  # it leaves first
    readers.append(Reader(default(prompt(9, 20)), begins=TOKENS))
    driven(watched(bench, ahead=False), readers)
    for size in (3, 4):
        firsts = {played.index(form) for form in played if form[0] == size}
        changes = {
            i for i, (a, b) in enumerate(pairwise([(0, 0), *played])) if a[0] != size == b[0]
        }
        rounds = sum(form[0] == size for form in played)
        assert firsts - changes and (changes - firsts or size == 3)
        assert learned.count(size) == rounds - len(firsts | changes)
    assert learned.count(1) == sum(form[0] == 1 for form in played)


def test_what_a_head_took_to_wake_is_no_part_of_a_rounds_cost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, seconds = taught(bench), list[float]()
    wake, learn = Drafter.wake, RoundPolicy.learn

    def slow_wake(self: Drafter) -> None:
        bench.now += 1000
        wake(self)

    def noted(self: RoundPolicy, *round_: Any) -> None:
        seconds.append(round_[-1])
        learn(self, *round_)

    rounds = itertools.count()

    def by_turns(*_: object) -> int:
        return next(rounds) // 6 % 2

    monkeypatch.setattr(RoundPolicy, "_choose_depth", by_turns)
    monkeypatch.setattr(Drafter, "wake", slow_wake)
    monkeypatch.setattr(RoundPolicy, "learn", noted)
    driven(served, crowd(4, 200))
    assert bench.now > 2000 and max(seconds) < 100


def test_it_catches_up_where_so_many_leave_that_drafts_pay(bench: Bench) -> None:
    served, readers = taught(bench), crowd(4, 200, tokens=TOKENS)
    readers[0] = Reader(default(prompt(0, 200), 4 * TOKENS))
    driven(served, readers)
    late = [r for r in readers[0].rounds if r.forward.batch == 1][-12:]
    assert sum(r.drafted for r in late) > 12
    # What it drafts is what a head that always read would draft.
    position = late[0].forward.position
    expected = alone(request(prompt(0, 200), 2, 4 * TOKENS, ignore_eos=True))
    kept_ids = {r.forward.position: (r.drafted, r.accepted) for r in expected.rounds}
    same = [r for r in late if (r.drafted == 2 and r.forward.position in kept_ids)]
    assert same and all(kept_ids[r.forward.position] == (2, r.accepted) for r in same), position
    assert_as_alone(readers)


def test_a_k_that_a_request_fixes_is_drafted_all_the_same(bench: Bench) -> None:
    served, readers = taught(bench), crowd(3, 200)
    readers.append(Reader(request(prompt(9, 200), 2, TOKENS, ignore_eos=True)))
    driven(served, readers)
    fixed = readers[-1]
    assert {r.drafted for r in fixed.rounds[1:-2]} == {2}
    assert_as_alone(readers)


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("seed", seeds(2, 12))
def test_ids_are_those_without_drafts_at_every_switch(
    bench: Bench, seed: int, *, ahead: bool
) -> None:
    """Verifies get dear and cheap again; requests join and leave."""
    draw = random.Random(seed)
    served = watched(bench, ahead=ahead)
    ends = [draw.choice([None, None, 60 + draw.randrange(90)]) for _ in range(9)]
    readers = [
        Reader(
            default(prompt(i, draw.choice([90, 150, 330])), draw.randrange(20, 70), 1 + i % 3),
            begins=draw.randrange(60),
            ends=ends[i],
        )
        for i in range(9)
    ]

    def switched(turn: int) -> None:
        bench.row = 0.0 if turn // 40 % 2 else DEAR

    driven(served, readers, switched)
    whole = [reader for reader in readers if reader.ends is None]
    assert_as_alone(whole)
    drafted = {r.drafted for each in readers for r in each.rounds if r.forward.batch > 2}
    assert len(drafted) > 1
    assert served.live_requests == 0 and served.cache_bytes() == 0


def test_a_prefix_that_a_resting_head_left_gives_the_same_answer_and_drafts(bench: Bench) -> None:
    served = taught(bench, prefix_cache_bytes=256 << 20)
    ids = prompt(5, 500)
    driven(served, [Reader(default(ids)), *crowd(3, 200)])
    parts_kept = [node.drafter for node in nodes(cache_of(served)) if node.drafter is not None]
    resting = [part for part in parts_kept if part.end == 0 and part.pending is not None]
    sizes = sorted(part.pending.shape[1] for part in resting if part.pending is not None)
    assert sizes and sizes[-1] <= 160, "a row is kept once, however many forwards follow it"
    _ = counted(cache_of(served))
    engine_request = request([*ids[:-2], 7, 8], 2, TOKENS, ignore_eos=True)
    again, cold = Reader(engine_request), watched(bench)
    driven(served, [again])
    anew = Reader(changed(engine_request, name="anew"))
    driven(cold, [anew])
    assert again.end is not None and again.end.stats.cached_tokens == 480
    assert again.ids == anew.ids
    rounds = [
        [(r.drafted, r.accepted, r.forward.position) for r in x.rounds] for x in (again, anew)
    ]
    assert rounds[0] == rounds[1] and sum(accepted for _, accepted, _ in rounds[0]) > 0


def test_a_head_that_rests_is_not_woken_for_a_moment() -> None:
    """If more answers are in progress than drafts pay for, and some of them soon join."""
    demand = DraftDemand(1, acceptance=Acceptance(1, Prior([90.0], [81.0])))
    policy, many, few = RoundPolicy(), [Offer(demand, 1)] * 8, [Offer(demand, 1)] * 2
    for offers, row in ((many, 9.0), (few, 0.1)):
        for _ in range(20):
            k = policy.choose(offers).k
            policy.learn(len(offers), 0, k, k, 1 + row * k)
    assert policy.is_resting(8) and not policy.is_resting(2)
    assert policy.choose(few, unread=500, running=8).k == 0
    assert policy.choose(few, unread=500, running=2).k == 1
    assert policy.choose(few, unread=0, running=8).k == 1
