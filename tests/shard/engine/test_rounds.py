"""The engine over tables: what it emits, what it leaves in the caches, which forwards it makes."""

from typing import Any

import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from tables import (
    PROMPT,
    EndAt,
    TableAnswer,
    TableHead,
    TableTarget,
    random_table,
    tell,
)

from exo_node.mtp.types import Forward, Prefilled, Round, Sampling
from exo_node.shard.tools.bare_engine import bare_engine, bare_request, ids_of, rounds_of

V = 8
BUDGET = 12
TARGET = random_table(V, seed=1)
DRAFTS = {
    "perfect": TARGET,
    "adversarial": -TARGET,
    "random": random_table(V, seed=2),
    "half": np.where(np.arange(64)[:, None, None] % 3 == 0, -TARGET, TARGET),
}
KS = [0, 1, 2, 3, 7]


def greedy_ids(length: int = BUDGET) -> tuple[int, ...]:
    """The target's answer, by numpy alone."""
    ids: list[int] = [*PROMPT]
    while len(ids) < len(PROMPT) + length:
        ids.append(int(TARGET[len(ids) - 1, ids[-1]].argmax()))
    return tuple(ids[len(PROMPT) :])


def drafted(k: int, name: str = "half", **changes: Any) -> TableAnswer:
    return tell(TARGET, DRAFTS[name] if k else None, k, **changes)


def assert_caches_fit(result: TableAnswer, prompt: tuple[int, ...] = PROMPT) -> None:
    """The target's has the rows of the prompt and of the answer but its last token, which a plain
    round that was in flight may have written; the head's has all those before its last draft."""
    text = [*prompt, *result.ids]
    plain = result.rounds[-1].drafted == 0
    assert result.cached_ids in ((text[:-1], text) if plain else (text[:-1],))
    if result.head is not None:
        drafts = [r.forward.position for r in result.rounds if r.drafted]
        rows = drafts[-1] if drafts else 0
        assert result.head.head_rows == [(at, text[at], text[at + 1]) for at in range(rows)]


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_greedy_ids_are_plain_decodings_at_every_budget(
    k: int, name: str, runs_ahead: bool
) -> None:
    for budget in range(1, BUDGET + 1):
        result = drafted(k, name, max_tokens=budget, runs_ahead=runs_ahead)
        assert result.ids == greedy_ids(budget)
        assert result.reason == "length"
        if not runs_ahead:
            assert_caches_fit(result)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_perfect_drafts_are_all_accepted_and_adversarial_ones_never(k: int) -> None:
    perfect = drafted(k, "perfect", max_tokens=1 + 4 * (k + 1)).rounds[1:]
    assert [(len(r.tokens), r.drafted, r.accepted) for r in perfect] == [(k + 1, k, k)] * 4
    adversarial = drafted(k, "adversarial").rounds[1:-k]
    assert {(len(r.tokens), r.drafted, r.accepted) for r in adversarial} == {(1, k, 0)}


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("name", DRAFTS)
def test_no_round_drafts_past_the_budget(k: int, name: str) -> None:
    """exo#2110: rows past max_tokens stayed in the caches."""
    result, emitted = drafted(k, name), 0
    for round_ in result.rounds:
        room = BUDGET - emitted - 1
        assert round_.drafted == (min(k, room) if emitted else 0)
        committed, rows = len(PROMPT) + emitted - 1, round_.drafted + 1
        assert round_.forward == (Forward(committed, rows) if emitted else Forward(0, len(PROMPT)))
        emitted += len(round_.tokens)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("name", ["perfect", "half"])
def test_an_answer_that_ends_inside_a_block_is_cut_there(k: int, name: str) -> None:
    """mlx-lm#990, exo#2110: tokens that were not emitted stayed in the caches."""
    for length in range(1, BUDGET + 1):
        ending = EndAt(length)
        result = drafted(k, name, ending=ending, max_tokens=30)
        assert (result.ids, result.reason) == (greedy_ids(length), "stop")
        assert tuple(ending.pushed) == result.ids, "nothing after the end reaches the text"
        assert_caches_fit(result)


def test_the_end_token_counts_as_accepted_where_it_was_drafted() -> None:
    first, whole = (drafted(3, "perfect", ending=EndAt(n)).rounds[-1] for n in (3, 5))
    assert (len(first.tokens), first.drafted, first.accepted) == (2, 3, 2)
    assert (len(whole.tokens), whole.drafted, whole.accepted) == (4, 3, 3)


@pytest.mark.parametrize("k", KS)
def test_an_end_token_at_the_budgets_last_place_is_a_stop(k: int) -> None:
    assert drafted(k, ending=EndAt(BUDGET)).reason == "stop"


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("end", [EndAt(3), EndAt()], ids=["stop", "length"])
def test_an_answer_that_ended_beside_others_receives_no_token_of_later_rounds(
    k: int, runs_ahead: bool, end: EndAt
) -> None:
    """Its next round may be computed when it ends, and its rows are dropped only later."""
    model = TableHead(DRAFTS["half"]).model
    ended, others = EndAt(end.count), EndAt()
    engine = bare_engine(TableTarget(TARGET), lambda: [KVCache()], model, runs_ahead=runs_ahead)
    requests = [
        bare_request(PROMPT, 3 if end.count > 3 else 40, k=k, stop_condition=ended),
        bare_request(PROMPT, 20, k=k, stop_condition=others),
    ]
    got = [ids_of(rounds) for rounds in rounds_of(engine, requests)]
    assert got == [tuple(ended.pushed), tuple(others.pushed)] == [greedy_ids(3), greedy_ids(20)]


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("rows", range(1, 10))
def test_prompts_are_read_once_in_chunks_by_target_and_head(k: int, rows: int) -> None:
    """exo#2110: twice on dense models, token by token on mixtures of experts."""
    prompt = tuple(i * 5 % V for i in range(rows))
    result = drafted(k, prompt=prompt, prefill_chunk=4)
    whole, last = divmod(rows - 1, 4)
    chunks = [*[(4, "none")] * whole, (last + 1, "last")]
    assert result.target.forwards[: whole + 1] == chunks
    assert {want for _, want in result.target.forwards[whole + 1 :]} == {"all"}
    progress = [step for step in result.steps if isinstance(step, Prefilled)]
    assert progress == [Prefilled(n, rows) for n in [*range(0, rows, 4), rows]]
    assert result.rounds[0].forward == Forward(4 * whole, last + 1)
    assert result.ids == drafted(0, prompt=prompt).ids
    assert_caches_fit(result, prompt)


SAMPLINGS = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, seed=1)]


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_replay_from_any_cut_continues_with_the_same_rounds(k: int, sampling: Sampling) -> None:
    def run(replay: tuple[Round, ...] = ()) -> TableAnswer:
        return drafted(k, sampling=sampling, replay=replay, ending=EndAt(10))

    whole = run()
    for cut in range(1, len(whole.rounds)):
        rest = run(whole.rounds[:cut])
        assert rest.rounds == whole.rounds[cut:]
        assert rest.reason == whole.reason == "stop"
        assert rest.target.forwards == whole.target.forwards, "the same rows, the same kernels"
        assert rest.cached_ids == whole.cached_ids


@pytest.mark.parametrize("k", [0, 2])
def test_a_replay_counts_towards_the_budget_and_the_ending(k: int) -> None:
    log = drafted(k, max_tokens=30).rounds[:4]
    num_tokens = sum(len(round_.tokens) for round_ in log)
    ending = EndAt()
    rest = drafted(k, replay=log, max_tokens=num_tokens + 2, ending=ending)
    assert (len(rest.ids), rest.reason) == (2, "length")
    assert tuple(ending.pushed) == greedy_ids(num_tokens + 2)
