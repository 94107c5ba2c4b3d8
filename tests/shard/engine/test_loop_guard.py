"""An answer with tools ends where it repeats itself: at the same token in every way to decode."""

import functools
import random

import pytest
from budget import seeds
from engines import ORACLE, Answer, answer, changed, request
from readers import Reader, alone, engine, together

from exo_node.shard.engine.loop_guard import EARLY, LATE, MAX_PERIOD, LoopGuard, LoopLimits
from exo_node.shard.text.grammars.grammar import Gate
from exo_node.shard.text.grammars.grammars import GrammarSpec

PROMPTS: list[list[int]] = [ORACLE[i]["prompt_ids"] for i in (3, 0, 1, 4)]
PROMPT = PROMPTS[0]
MANY = 200
SHORT = LoopLimits(72, 6)
"""So that the answers of tests are short."""


def end_of(ids: list[int], limits: LoopLimits = SHORT) -> int | None:
    """The definition itself: the first count of ids of which the last ones are a loop."""
    lengths = [0] * (MAX_PERIOD + 1)
    for count in range(1, len(ids) + 1):
        for period in range(1, min(MAX_PERIOD, count - 1) + 1):
            same = ids[count - 1] == ids[count - 1 - period]
            lengths[period] = max(lengths[period], period) + 1 if same else 0
            if lengths[period] >= limits.of(period):
                return count
    return None


def guarded(ids: list[int], limits: LoopLimits = SHORT) -> tuple[int | None, str]:
    guard = LoopGuard(limits)
    count = next((count for count, token in enumerate(ids, 1) if guard.push(token)), None)
    return count, guard.reason


@pytest.mark.parametrize(
    ("limits", "period"),
    [
        *((SHORT, period) for period in (1, 2, 5, 11, 12, 13, 24, 100, MAX_PERIOD)),
        *((limits, period) for limits in (EARLY, LATE) for period in (1, 24, MAX_PERIOD)),
    ],
    ids=str,
)
def test_a_loop_ends_the_answer_with_the_token_that_completes_it(
    limits: LoopLimits, period: int
) -> None:
    draw = random.Random(period)
    for before in (0, 1, 31, 32, 33, 1500):
        loop = [draw.randrange(1000, 2000) for _ in range(period)]
        length = limits.of(period)
        ids = [draw.randrange(1000) for _ in range(before)] + loop * (length // period + 2)
        count, reason = guarded(ids, limits)
        assert count == before + length
        assert reason.startswith(f"the last {length} tokens are a loop of {period};")
        short = ids[: before + length - 1]
        assert guarded([*short, 5, *short, 6], limits) == (None, ""), "one token is missing"


@pytest.mark.smoke
def test_a_longer_period_is_no_loop() -> None:
    loop = list(range(MAX_PERIOD + 1))
    assert guarded(loop * 20) == (None, "")


@pytest.mark.parametrize("seed", seeds(20, 400))
def test_random_repeats_end_where_the_definition_says(seed: int) -> None:
    """Of few ids, so that periods begin, break, and hold at the same time."""
    draw = random.Random(seed)
    ids: list[int] = []
    for _ in range(8):
        loop = [draw.randrange(draw.choice([1, 2, 9])) for _ in range(draw.randrange(1, 40))]
        repeats = draw.randrange(1, 2 * max(SHORT.repeats, SHORT.tokens // len(loop)))
        ids += (loop * repeats)[: draw.randrange(1, len(loop) * repeats + 1)]
        ids += [draw.randrange(9) for _ in range(draw.randrange(3))]
    assert guarded(ids)[0] == end_of(ids)


# ------------------------------------------------------------- in the engine


@functools.cache
def looping(k: int = 0, **changes: object) -> Answer:
    fields: dict[str, object] = {"ignore_eos": True, "loop_limits": SHORT, **changes}
    return alone(request(PROMPT, k, MANY, **fields))


def unguarded() -> Answer:
    return looping(loop_limits=None)


def assert_ended_by_its_loop(got: Answer, before: tuple[int, ...] = ()) -> None:
    whole = unguarded()
    count = end_of(list(whole.ids))
    assert count is not None and SHORT.tokens < count < MANY == len(whole.ids)
    assert (*before, *got.ids) == whole.ids[:count], "nothing before the end is another"
    assert got.end.reason == "length"
    assert got.stats.loop_reason.startswith("the last ")
    assert got.stats.completion_tokens == count


@pytest.mark.parametrize("k", [0, 1, 3])
def test_it_ends_at_the_same_token_with_any_number_of_drafts(k: int) -> None:
    assert_ended_by_its_loop(looping(k))
    assert not unguarded().stats.loop_reason


@pytest.mark.parametrize("ahead", [False, True])
def test_in_a_batch_each_answer_ends_at_its_own_loop(*, ahead: bool) -> None:
    readers = [
        Reader(
            request(prompt, i % 3, MANY, ignore_eos=True, loop_limits=None if i == 1 else SHORT),
            begins=3 * i,
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    together(engine(runs_ahead=ahead), readers)
    for i, reader in enumerate(readers):
        plain = alone(changed(reader.request, loop_limits=None, num_draft_tokens=0)).ids
        assert tuple(reader.ids) == plain[: end_of(list(plain)) if i != 1 else MANY]
        assert reader.end is not None and bool(reader.end.stats.loop_reason) is (i != 1)
    assert max(each.forward.batch for r in readers for each in r.rounds) > 2


@pytest.mark.parametrize("k", [0, 3])
def test_a_resumed_answer_ends_at_the_same_token(k: int) -> None:
    first = looping(k)
    for cut in (1, len(first.rounds) - 1, len(first.rounds)):
        log, served = first.rounds[:cut], engine()
        again = request(PROMPT, k, MANY, ignore_eos=True, loop_limits=SHORT, attempt=2, replay=log)
        assert_ended_by_its_loop(answer(served, again), tuple(t for r in log for t in r.tokens))


def test_what_ends_an_answer_otherwise_has_no_reason_of_a_loop() -> None:
    count = len(looping().ids)
    at_once = alone(request(PROMPT, 0, count, ignore_eos=True, loop_limits=SHORT))
    assert len(at_once.ids) == count and not at_once.stats.loop_reason


def test_under_a_grammar_an_answer_may_repeat_itself() -> None:
    served = engine()
    spec = GrammarSpec("regex", "(ab){200}", "regex")
    wish = request(
        PROMPT,
        0,
        2 * SHORT.tokens,
        ignore_eos=True,
        loop_limits=SHORT,
        grammar=served.codec.grammars.compile(spec, Gate()),
    )
    got = answer(served, wish)
    assert end_of(list(got.ids)) is not None
    assert len(got.ids) == 2 * SHORT.tokens and not got.stats.loop_reason
