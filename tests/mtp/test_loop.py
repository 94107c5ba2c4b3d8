"""The loop over tables: what it emits, what it leaves in the caches, what it asks of its seams."""

from concurrent.futures import Future
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tables import PROMPT, EndAt, Logits, TableDrafter, TableVerifier, Told, random_table, tell

from exo_node.mtp.answer import CLEAR_EVERY
from exo_node.mtp.drafters import NoDrafter
from exo_node.mtp.loop import Generation
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.seams import Wait
from exo_node.mtp.steps import Prefilled
from exo_node.mtp.task import Task
from exo_node.mtp.types import Forward, Round, Sampling

V = 8
BUDGET = 12
TARGET = random_table(V, seed=1)
DRAFTS = {
    "perfect": TARGET,
    "adversarial": -TARGET,
    "random": random_table(V, seed=2),
    "half": np.where(np.arange(64)[:, None, None] % 3 == 0, -TARGET, TARGET),
}
KS = [0, 1, 2, 3, 5]


def greedy_ids(length: int = BUDGET) -> tuple[int, ...]:
    """The target's answer, by numpy alone."""
    ids: list[int] = [*PROMPT]
    while len(ids) < len(PROMPT) + length:
        ids.append(int(TARGET[len(ids) - 1, ids[-1]].argmax()))
    return tuple(ids[len(PROMPT) :])


def drafted(k: int, name: str = "half", **changes: Any) -> Told:
    return tell(TARGET, DRAFTS[name] if k else None, k, **changes)


def assert_caches_fit(told: Told, prompt: tuple[int, ...] = PROMPT) -> None:
    """Rows of the prompt and of the answer but its last token, in the target and in the drafter."""
    text = [*prompt, *told.ids]
    assert told.verifier.ids == text[:-1]
    if isinstance(told.drafter, TableDrafter):
        pairs = [(at, text[at], text[at + 1]) for at in range(len(text) - 1)]
        assert told.drafter.seen == pairs


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("overlaps", [False, True])
def test_greedy_ids_are_plain_decodings_at_every_budget(k: int, name: str, overlaps: bool) -> None:
    for budget in range(1, BUDGET + 1):
        told = drafted(k, name, max_tokens=budget, overlaps=overlaps)
        assert told.ids == greedy_ids(budget)
        assert told.reason == "length"
        assert_caches_fit(told)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_perfect_drafts_are_all_accepted_and_adversarial_ones_never(k: int) -> None:
    perfect = drafted(k, "perfect", max_tokens=1 + 4 * (k + 1)).rounds[1:]
    assert [(len(r.tokens), r.drafted, r.accepted) for r in perfect] == [(k + 1, k, k)] * 4
    adversarial = drafted(k, "adversarial").rounds[1:-k]
    assert {(len(r.tokens), r.drafted, r.accepted) for r in adversarial} == {(1, k, 0)}


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("name", DRAFTS)
def test_no_round_drafts_past_the_budget(k: int, name: str) -> None:
    told, emitted = drafted(k, name), 0
    for round_ in told.rounds:
        room = BUDGET - emitted - 1
        assert round_.drafted == (min(k, room) if emitted else 0)
        committed, rows = len(PROMPT) + emitted - 1, round_.drafted + 1
        assert round_.forward == (Forward(committed, rows) if emitted else Forward(0, len(PROMPT)))
        emitted += len(round_.tokens)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("name", ["perfect", "half"])
def test_an_answer_that_ends_inside_a_block_is_cut_there(k: int, name: str) -> None:
    for length in range(1, BUDGET + 1):
        ending = EndAt(length)
        told = drafted(k, name, ending=ending, max_tokens=30)
        assert (told.ids, told.reason) == (greedy_ids(length), "stop")
        assert tuple(ending.pushed) == told.ids, "nothing after the end reaches the text"
        assert_caches_fit(told)


def test_the_end_token_counts_as_accepted_where_it_was_drafted() -> None:
    first, whole = (drafted(3, "perfect", ending=EndAt(n)).rounds[-1] for n in (3, 5))
    assert (len(first.tokens), first.drafted, first.accepted) == (2, 3, 2)
    assert (len(whole.tokens), whole.drafted, whole.accepted) == (4, 3, 3)


@pytest.mark.parametrize("k", KS)
def test_an_end_token_at_the_budgets_last_place_is_a_stop(k: int) -> None:
    assert drafted(k, ending=EndAt(BUDGET)).reason == "stop"


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("rows", range(1, 10))
def test_prefill_feeds_target_and_drafter_once_at_every_chunk_border(k: int, rows: int) -> None:
    prompt = tuple(i * 5 % V for i in range(rows))
    told = drafted(k, prompt=prompt, prefill_chunk=4)
    whole, last = divmod(rows - 1, 4)
    chunks = [*["forward 4 none"] * whole, f"forward {last + 1} last"]
    assert told.verifier.calls[: whole + 1] == chunks
    assert not any("none" in call or "last" in call for call in told.verifier.calls[whole + 1 :])
    progress = [step for step in told.steps if isinstance(step, Prefilled)]
    assert progress == [Prefilled(n, rows) for n in [*range(0, rows, 4), rows]]
    assert told.rounds[0].forward == Forward(4 * whole, last + 1)
    assert told.ids == drafted(0, prompt=prompt).ids
    assert_caches_fit(told, prompt)


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        _ = tell(TARGET, prompt=())


def test_plain_decoding_issues_one_forward_ahead_of_the_token_it_hands_out() -> None:
    verifier, chooser = TableVerifier(TARGET, overlaps=True), Sampler(Sampling(), 0)
    task = Task(PROMPT, BUDGET, 256)
    emitted = 0
    for step in Generation(task, verifier, NoDrafter(), chooser, EndAt()).steps():
        if isinstance(step, Round):
            emitted += 1
            assert verifier.position == min(len(PROMPT) + emitted, len(PROMPT) + BUDGET - 1)
            assert step.forward == (
                Forward(0, len(PROMPT)) if emitted == 1 else Forward(len(PROMPT) + emitted - 2, 1)
            )
    assert emitted == BUDGET


def test_plain_decoding_takes_back_its_forward_when_the_answer_ends_early() -> None:
    told = drafted(0, overlaps=True, ending=EndAt(5))
    assert told.verifier.calls == ["forward 3 last", *["forward 1 all"] * 5, "rollback 1"]
    assert_caches_fit(told)


@pytest.mark.parametrize("length", range(1, BUDGET + 1))
def test_a_row_that_cannot_be_taken_back_is_left_behind_at_the_end_only(length: int) -> None:
    told = drafted(0, overlaps=True, takes_back=False, ending=EndAt(length))
    assert (told.ids, told.reason) == (greedy_ids(length), "stop")
    text = [*PROMPT, *told.ids]
    assert told.verifier.ids == (text if length < BUDGET else text[:-1])
    assert not any("rollback" in call for call in told.verifier.calls)


def test_plain_decoding_computes_nothing_past_max_tokens() -> None:
    for ending in (None, EndAt(BUDGET)):
        told = drafted(0, overlaps=True, ending=ending)
        assert told.verifier.calls == ["forward 3 last", *["forward 1 all"] * (BUDGET - 1)]


def test_a_verifier_that_cannot_roll_back_decodes_plainly_without_it() -> None:
    told = drafted(0, ending=EndAt(5))
    assert told.verifier.calls == ["forward 3 last", *["forward 1 all"] * 4]


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, seed=1)]
)
def test_a_replay_from_any_cut_goes_on_with_the_same_rounds(k: int, sampling: Sampling) -> None:
    def run(replay: tuple[Round, ...], **changes: Any) -> Told:
        return drafted(k, sampling=sampling, replay=replay, ending=EndAt(10), **changes)

    whole = run(())
    for cut in range(1, len(whole.rounds) + 1):
        rest = run(whole.rounds[:cut])
        assert rest.rounds == whole.rounds[cut:]
        assert rest.reason == whole.reason == "stop"
        assert rest.verifier.ids == whole.verifier.ids
        assert rest.verifier.calls == whole.verifier.calls, "the same rows choose the same kernels"
        if k:
            assert isinstance(rest.drafter, TableDrafter)
            assert isinstance(whole.drafter, TableDrafter)
            assert rest.drafter.seen == whole.drafter.seen


@pytest.mark.parametrize("k", [0, 2])
def test_a_replay_counts_towards_the_budget_and_the_ending(k: int) -> None:
    log = drafted(k, max_tokens=30).rounds[:4]
    done = sum(len(round_.tokens) for round_ in log)
    ending = EndAt()
    rest = drafted(k, replay=log, max_tokens=done + 2, ending=ending)
    assert (len(rest.ids), rest.reason) == (2, "length")
    assert tuple(ending.pushed) == greedy_ids(done + 2)


def test_a_round_logged_ahead_of_the_token_replays_without_overlap() -> None:
    """A log of plain decoding with look-ahead is taken up by the plain round."""
    whole = drafted(0, overlaps=True)
    for cut in range(1, BUDGET):
        rest = drafted(0, overlaps=True, replay=whole.rounds[:cut])
        assert rest.rounds == whole.rounds[cut:]
        assert rest.verifier.ids == whole.verifier.ids


@pytest.mark.parametrize("parked", [False, True])
def test_an_answer_whose_head_was_parked_in_a_batch_comes_back_without_it(parked: bool) -> None:
    chooser, away = Sampler(Sampling(), 0), True
    drafter = TableDrafter(DRAFTS["half"], chooser, 2)
    parts = TableVerifier(TARGET), drafter, chooser, EndAt()
    generation = Generation(Task(PROMPT, BUDGET, 256), *parts, leaves=lambda: away)
    first = [step.tokens for step in generation.steps() if isinstance(step, Round)]
    assert len(first) == 1 and generation.token is not None
    away = False
    if parked:
        generation.answer.parked_at = len(PROMPT) + 1
    generation.come_back(drafter, generation.token)
    rounds = [step for step in generation.steps() if isinstance(step, Round)]
    assert first[0] + tuple(id_ for r in rounds for id_ in r.tokens) == greedy_ids()
    assert bool(drafter.asked) is any(r.drafted for r in rounds) is not parked


@pytest.mark.parametrize("k", [0, 2])
def test_waits_reach_the_driver_one_for_each_forward(k: int) -> None:
    told = drafted(k, waits=True, prefill_chunk=2)
    waits = [step for step in told.steps if isinstance(step, Wait)]
    assert len(waits) == sum(call.startswith("forward") for call in told.verifier.calls)
    assert all(isinstance(wait.future, Future) for wait in waits)
    assert told.rounds == drafted(k, prefill_chunk=2).rounds
    again = drafted(k, waits=True, prefill_chunk=2, replay=told.rounds[:3])
    assert again.rounds == told.rounds[3:]


@pytest.mark.parametrize("k", [0, 3])
def test_buffers_are_freed_by_tokens_emitted(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """Counting rounds, or rows modulo the block, would let them pile up."""
    freed: list[int] = []
    ending = EndAt()

    def clear() -> None:
        freed.append(len(ending.pushed) + 1)

    monkeypatch.setattr(mx, "clear_cache", clear)
    target: Logits = np.tile(TARGET, (10, 1, 1))
    draft = np.tile(DRAFTS["half"], (10, 1, 1)) if k else None
    _ = tell(target, draft, k, max_tokens=600, ending=ending)
    assert freed == [CLEAR_EVERY, 2 * CLEAR_EVERY]
