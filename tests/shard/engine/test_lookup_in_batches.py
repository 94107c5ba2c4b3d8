"""Requests that share forwards copy drafts, each its own, and answer as they do alone."""

# pyright: reportPrivateUsage=false

import functools
import json
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from budget import seeds
from clocks import Clock
from engines import Answer, answer, changed, engine_of, load_quietly, request
from forced_copies import FixedLength, force
from plain_gated_delta import give_kernels
from readers import GREEDY, Reader, both_ways, engine, prompt, together
from shims import perturb
from small import LAYERS, small_engine, small_spec

from exo_node.mtp.drafting.acceptance import Acceptance
from exo_node.mtp.drafting.lookup import NO_MATCH, Match, SuffixIndex
from exo_node.mtp.families.taped_gated_delta import MAX_STATE_ROWS
from exo_node.mtp.types import MAX_ROUND_ROWS, Sampling
from exo_node.shard.engine import executor
from exo_node.shard.engine.answers.lookup_control import NOT_EXACT_TOGETHER
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.batch import Batch
from exo_node.shard.engine.issued_round import IssuedRound
from exo_node.shard.engine.request import Parameters
from exo_node.shard.engine.stage_copies import STATE_LENGTHS
from exo_node.shard.model.load import Loaded
from exo_node.shard.text.grammars.grammar import Gate
from exo_node.shard.text.grammars.grammars import GrammarSpec

TOKENS = 40
FEW = tuple((token, 100.0) for token in (40, 41, 42))
HOT = Sampling(temperature=1.0, seed=5, logit_bias=FEW)
"""Draws from three ids, so that the last ones occurred before, and other ones often followed."""
COOL = Sampling(temperature=0.02, seed=11)
PENALISED = Sampling(repetition_penalty=1.1, repetition_context_size=30)


def copying(length: int = 7, **changes: Any) -> TextEngine:
    """An engine that copies up to `length` tokens wherever the last ones occurred before."""
    served = engine(clock=Clock(step=0.001), **changes)
    force(served.lookup, FixedLength(length))
    return served


def plain(engine_request: Parameters) -> Answer:
    """The answer alone, without any draft."""
    bare = changed(
        engine_request,
        num_draft_tokens=0,
        adaptive_draft=False,
        prompt_lookup=False,
        drafting_reason="a test",
        replay=(),
    )
    return answer(engine(batching=False), bare)


def never_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rounds without copies come after a change."""

    def resume(_index: SuffixIndex, _broken: Match, _since: int) -> Match:
        return NO_MATCH

    monkeypatch.setattr(SuffixIndex, "resume", resume)


def repeating(
    number: int = 1, k: int = 0, *, places: Sequence[int] = (20,), **options: Any
) -> Parameters:
    """The prompt holds its own answer, with ids changed at some places."""
    options = {"prompt_lookup": True, "ignore_eos": True, "max_tokens": TOKENS, **options}
    first = request(prompt(number), 0, sampling=options.get("sampling", GREEDY), ignore_eos=True)
    body = list(plain(changed(first, max_tokens=TOKENS)).ids)
    for place in places:
        body[place] += 1
    return request([*prompt(number), *body, *prompt(number)], k, **options)


def prose(number: int = 4, k: int = 0, **options: Any) -> Parameters:
    options = {"prompt_lookup": True, "ignore_eos": True, "max_tokens": TOKENS, **options}
    return request(prompt(number, 30 + number), k, **options)


@functools.cache
def with_kernels() -> Loaded:
    """The small model with the CPU twin of the kernel that keeps states."""
    loaded = load_quietly(small_spec(native_mtp=True))
    assert give_kernels(loaded.model.model) == LAYERS - 1
    return loaded


def kernel_engine(*, runs_ahead: bool = False, **changes: Any) -> TextEngine:
    spec = small_spec(native_mtp=True, prefill_chunk=160, **changes)
    return engine_of(with_kernels(), spec, runs_ahead=runs_ahead)


def assert_plain(readers: Sequence[Reader]) -> None:
    """A cancelled answer is compared as far as it got."""
    for reader in readers:
        alone = plain(reader.request).ids
        assert reader.fault is None
        assert tuple(reader.ids) == alone[: len(alone) if reader.ends is None else len(reader.ids)]


def shared_copies(reader: Reader) -> int:
    return sum(r.is_copied for r in reader.rounds if r.forward.batch > 1)


@pytest.mark.parametrize("seed", seeds(2, 12))
def test_members_join_and_leave_in_the_middle(seed: int) -> None:
    draw, readers = random.Random(seed), list[Reader]()
    for number in range(8):
        begins = draw.randrange(40)
        k, adaptive = draw.randrange(4), draw.random() < 0.5
        options: dict[str, Any] = {
            "adaptive_draft": adaptive,
            "max_tokens": draw.randrange(2, TOKENS),
        }
        options["sampling"] = draw.choice([GREEDY, COOL, HOT, PENALISED])
        request_ = (
            repeating(number % 4, k, places=draw.sample(range(TOKENS), 2), **options)
            if draw.random() < 0.7
            else prose(number, k, **options)
        )
        ends = begins + draw.randrange(10, 60) if draw.random() < 0.3 else None
        readers.append(Reader(request_, begins, ends))
    served = copying(draw.choice([3, 7]), runs_ahead=draw.random() < 0.5)
    together(served, readers)
    assert_plain(readers)
    assert sum(shared_copies(reader) for reader in readers)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("body", "others"),
    [("abcabcabcabcabcabd", []), ("abcabcabcabcabcabcabcabe", [2])],
    ids=["alone", "together"],
)
def test_a_copy_ends_before_what_a_grammar_forbids(body: str, others: list[int]) -> None:
    """The prompt goes on otherwise than that allows. Alone, only whole copies are drafted."""
    served = copying(3)
    text = {"type": "string", "enum": ["abcabcabcabcabcabd"]}
    rows = served.codec.encode_text(f'"{body}')

    def structured(*, lookup: bool) -> Parameters:
        spec = GrammarSpec("json_schema", json.dumps(text), "f")
        matcher = served.codec.grammars.compile(spec, Gate())
        return request([*rows, *prompt(1)], 0, TOKENS, grammar=matcher, prompt_lookup=lookup)

    bound, free = Reader(structured(lookup=True), 3), [Reader(repeating(each)) for each in others]
    together(served, [bound, *free])
    assert tuple(bound.ids) == answer(served, structured(lookup=False)).ids
    assert_plain(free)
    assert any(r.is_copied for r in bound.rounds)
    assert not free or all(map(shared_copies, (bound, *free)))
    assert all(r.accepted == r.drafted for r in bound.rounds)


@pytest.mark.smoke
@pytest.mark.parametrize("others", [[], [4]], ids=["alone", "together"])
def test_stats_tell_copies_from_the_heads_drafts(
    others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    never_resumes(monkeypatch)
    reader = Reader(repeating(1, 2))
    company = [Reader(prose(each, 2, max_tokens=2 * TOKENS)) for each in others]
    together(copying(), [reader, *company])
    assert reader.end is not None
    stats, copies = reader.end.stats, [r for r in reader.rounds if r.is_copied]
    by_head = [r for r in reader.rounds if r.drafted and not r.is_copied]
    assert copies and by_head and bool(stats.batched_tokens) == bool(others)
    assert stats.spec_decode_rounds == len(copies) + len(by_head)
    assert stats.lookup_rounds == len(copies)
    assert stats.lookup_proposed_tokens == sum(r.drafted for r in copies)
    assert stats.lookup_accepted_tokens == sum(r.accepted for r in copies)
    assert stats.proposed_draft_tokens == sum(r.drafted for r in (*copies, *by_head))
    assert stats.accepted_draft_tokens == sum(r.accepted for r in (*copies, *by_head))
    assert stats.lookup_reason == ""


def test_copies_teach_the_head_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the head would draft more, or less, than its own drafts deserve."""
    taught, add = list[int](), Acceptance.add

    def watched(self: Acceptance, drafted: int, accepted: int) -> None:
        taught.append(drafted)
        add(self, drafted, accepted)

    monkeypatch.setattr(Acceptance, "add", watched)
    others = [
        Reader(prose(4, 2, adaptive_draft=True, max_tokens=2 * TOKENS)),
        Reader(prose(5, 2, max_tokens=2 * TOKENS)),
    ]
    readers = [
        Reader(repeating(number, 2, adaptive_draft=True, max_tokens=2 * TOKENS), begins=2)
        for number in (1, 2)
    ]
    together(copying(), [*others, *readers])
    assert sum(shared_copies(reader) for reader in readers)
    assert set(taught) <= {1, 2}


@both_ways
def test_without_a_head_plain_rounds_run_ahead_until_an_index_matches(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    never_resumes(monkeypatch)
    forms, issue = set[str](), Batch.issue

    def watched(self: Batch, running: int) -> IssuedRound | None:
        behind, flight = self.in_flight, issue(self, running)
        if len(self.requests) == 2:
            if flight is not None and any(flight.plan.copies):
                forms.add("copies ahead" if behind else "copies")
            elif behind:
                forms.add("plain ahead" if flight is not None else "waits")
        return flight

    monkeypatch.setattr(Batch, "issue", watched)
    readers = [Reader(repeating(number, 0, places=(6, 18))) for number in (1, 2)]
    together(copying(runs_ahead=ahead), readers)
    assert_plain(readers)
    assert forms == ({"copies", "plain ahead", "waits"} if ahead else {"copies"})


@both_ways
@pytest.mark.parametrize("length", STATE_LENGTHS)
def test_where_kernels_keep_states(length: int, ahead: bool) -> None:
    """With the CPU twin of the kernel."""
    served = kernel_engine(runs_ahead=ahead)
    force(served.lookup, FixedLength(length))
    readers = [
        Reader(repeating(1 + i % 2, i % 3, places=(9 + 2 * i,), max_tokens=TOKENS + 3 * i))
        for i in range(6)
    ]
    together(served, readers)
    for reader in readers:
        bare = changed(
            reader.request, num_draft_tokens=0, prompt_lookup=False, drafting_reason="a test"
        )
        assert tuple(reader.ids) == answer(kernel_engine(batching=False), bare).ids
    copies = [r for reader in readers for r in reader.rounds if r.is_copied]
    shared = [r for r in copies if r.forward.batch > 1]
    # More than two have no room for 32 rows each: copies take the place of the head's two drafts.
    assert {r.forward.rows for r in copies} == ({4} if length == 3 else {3, 32})
    assert length > 3 or {r.accepted for r in shared} > {0, 3}


@both_ways
def test_two_requests_keep_different_rows_of_longer_copies_than_have_states(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states that their rounds do not leave are no room for the next ones either."""
    served, state_rows = kernel_engine(runs_ahead=ahead), list[int]()

    def room(row_bytes: int, freed: int) -> int:
        state_rows.append(freed // row_bytes)
        return MAX_ROUND_ROWS

    options = {"top_logprobs": 0, "max_tokens": 120}
    requests = [repeating(n, 0, places=(9 * n, 30), **options) for n in (1, 2)]
    bare = {"prompt_lookup": False, "drafting_reason": "a test"}
    expected = [answer(kernel_engine(batching=False), changed(each, **bare)) for each in requests]
    monkeypatch.setattr(executor, "rows_with_room", room)
    force(served.lookup, FixedLength(31))
    readers = [Reader(each) for each in requests]
    together(served, readers)
    shared = [
        r
        for reader in readers
        for r in reader.rounds
        if (r.forward.batch, r.forward.rows) == (2, 32)
    ]
    kept = {r.accepted for r in shared if r.is_copied}
    assert min(kept) < MAX_STATE_ROWS < max(kept) and max(state_rows) < 8
    for reader, alone in zip(readers, expected, strict=True):
        got = [entry for r in reader.rounds for entry in r.logprobs]
        assert got == [entry for r in alone.rounds for entry in r.logprobs] and len(got) == 120


def by_copied_batch(x: mx.array, rows: int) -> float:
    """Numbers of a batch differ with 8 or 16 rows of each request."""
    del rows
    return float(x.ndim == 3 and x.shape[0] > 1 and x.shape[1] in (8, 16))


def by_batch(x: mx.array, rows: int) -> float:
    del rows
    return float(x.ndim == 3 and x.shape[0] > 1)


def test_only_widths_that_are_exact_in_batches_are_used() -> None:
    served = small_engine(prompt_lookup=True, context_length=512)
    assert perturb(served._stage.model, by_copied_batch) > 0
    served.measurements.measure()
    profile = served.measurements.profile
    assert profile.copies is not None and profile.shared_copies is not None
    assert profile.copies.exact == (3, 7, 15)
    assert profile.shared_copies.exact == (3,)


def test_where_batches_are_inexact_requests_copy_alone_and_say_why() -> None:
    served = small_engine(prompt_lookup=True, context_length=512)
    assert perturb(served._stage.model, by_batch) > 0
    served.measurements.measure()
    assert not served.lookup.policy.shared_lengths
    readers = [Reader(request(prompt(i), 0, 12, prompt_lookup=True)) for i in range(2)]
    together(served, readers)
    for reader in readers:
        assert reader.end is not None and shared_copies(reader) == 0
        assert reader.end.stats.lookup_reason == NOT_EXACT_TOGETHER
    assert served.lookup.reason(request(prompt(1), 0, 12, prompt_lookup=True)) == ""
