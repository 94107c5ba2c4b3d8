"""The arithmetic of `exo-node bench mtp` on canned figures, and the prompts that it reads."""

import json
from pathlib import Path

import pytest

from exo_node.placement.errors import InvalidSettings
from exo_node_bench.mtp.report import (
    Arm,
    StepCosts,
    TimedRun,
    summarise,
    summarise_categories,
)
from exo_node_bench.prompts import read_prompts
from exo_node_bench.spread import Spread

OFF, TWO = Arm("K=0", "off", 0), Arm("K=2", "fixed", 2)


def off_run(repeat: int, seconds: float, prompt: int = 0, ttft: float = 0.1) -> TimedRun:
    """41 tokens, so 40 plain steps."""
    return TimedRun(
        *(repeat, "K=0", prompt, 41, ttft, seconds, "length"),
        draft_k_histogram=(40,),
        same_ids=True,
    )


def drafted_run(
    repeat: int, seconds: float, prompt: int = 0, ttft: float = 0.1, *, same: bool | None = True
) -> TimedRun:
    """The same 40 tokens by 16 rounds of two drafts: 24 of 32 accepted, 15 first and 9 second."""
    return TimedRun(
        *(repeat, "K=2", prompt, 41, ttft, seconds, "length"),
        rounds=16,
        proposed=32,
        accepted=24,
        accepted_per_position=(15, 9),
        draft_k_histogram=(0, 0, 16),
        same_ids=same,
    )


# ------------------------------------------------------------------------- the arithmetic


def test_a_ratio_is_taken_within_a_repeat_and_the_median_over_them() -> None:
    """The machine is twice as slow in the second repeat: the rates show it, the ratios do not."""
    runs = [off_run(0, 4.0), drafted_run(0, 2.0), off_run(1, 8.0), drafted_run(1, 4.0)]
    runs += [off_run(2, 4.0), drafted_run(2, 1.6)]
    off, two = summarise((OFF, TWO), runs, None)
    assert off.tok_s == Spread(10.0, 5.0, 10.0)
    assert two.tok_s == Spread(20.0, 10.0, 25.0)
    assert two.vs_off == Spread(2.0, 2.0, 2.5)
    assert off.vs_off == Spread(1.0, 1.0, 1.0)


def test_break_even_is_what_a_round_took_in_plain_steps() -> None:
    costs = StepCosts(0.1, (1.0, 1.2, 1.5), (0.0, 0.1, 0.2))
    off, two = summarise((OFF, TWO), [off_run(0, 4.0), drafted_run(0, 2.0)], costs)
    assert two.tokens_per_round == 40 / 16
    # 16 rounds in the time of 20 plain steps.
    assert two.break_even_tokens == 20 / 16
    assert (two.verify_steps, two.draft_steps) == (1.5, 0.2)
    assert (off.tokens_per_round, off.break_even_tokens, off.verify_steps) == (1.0, None, None)


def test_acceptance_is_of_proposed_of_emitted_and_by_position() -> None:
    runs = [off_run(0, 4.0), drafted_run(0, 2.0), off_run(1, 4.0), drafted_run(1, 2.0)]
    off, two = summarise((OFF, TWO), runs, None)
    assert (two.rounds, two.proposed, two.accepted, two.tokens) == (32, 64, 48, 82)
    assert two.acceptance == 0.75
    assert two.accepted_of_emitted == 48 / 82
    assert two.acceptance_per_position == (15 / 16, 9 / 16)
    assert (off.acceptance, off.rounds, off.acceptance_per_position) == (None, None, ())


def test_a_position_counts_the_rounds_that_came_so_far() -> None:
    """An adaptive arm: 10 plain steps, 6 rounds of one draft, 4 of two."""
    run = TimedRun(
        *(0, "adaptive", 0, 33, 0.1, 2.0, "length"),
        *(10, 14, 12, (9, 3), (10, 6, 4)),
    )
    _, adaptive = summarise((OFF, Arm("adaptive", "adaptive", 2)), [off_run(0, 4.0), run], None)
    assert adaptive.acceptance_per_position == (9 / 10, 3 / 4)
    assert adaptive.tokens_per_round == 32 / 20


def test_a_prompts_different_ids_are_counted_once_whatever_the_repeat() -> None:
    runs = [
        drafted_run(repeat, 2.0, prompt, same=(repeat, prompt) != (1, 0))
        for repeat in range(2)
        for prompt in range(3)
    ]
    off = [off_run(repeat, 4.0, prompt) for repeat in range(2) for prompt in range(3)]
    assert [arm.same_ids for arm in summarise((OFF, TWO), off + runs, None)] == [3, 2]
    sampled = [drafted_run(0, 2.0, same=None)]
    assert summarise((OFF, TWO), [off[0], *sampled], None)[1].same_ids is None


def test_time_to_first_token_is_the_prompts_mean_and_paired() -> None:
    runs = [off_run(0, 4.0, 0, ttft=0.1), off_run(0, 4.0, 1, ttft=0.3)]
    runs += [drafted_run(0, 2.0, 0, ttft=0.2), drafted_run(0, 2.0, 1, ttft=0.4)]
    _, two = summarise((OFF, TWO), runs, None)
    assert two.ttft_s is not None and two.ttft_vs_off is not None
    assert two.ttft_s.median == pytest.approx(0.3)
    assert two.ttft_vs_off.median == pytest.approx(1.5)


def test_categories_are_compared_with_their_own_plain_runs() -> None:
    runs = [off_run(0, 4.0, 0), off_run(0, 2.0, 1), drafted_run(0, 2.0, 0), drafted_run(0, 4.0, 1)]
    code, story = summarise_categories((OFF, TWO), runs, ["code", "story"])
    assert (code.category, code.arm, code.prompts) == ("code", "K=2", 1)
    assert code.vs_off == Spread(2.0, 2.0, 2.0)
    assert story.vs_off == Spread(0.5, 0.5, 0.5)
    assert summarise_categories((OFF, TWO), runs, ["code", "code"]) == ()


# ---------------------------------------------------------------------------- the prompts


def test_a_jsonl_file_may_name_and_group_its_prompts(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    first = {"prompt": "a\nb", "id": "x\x1b[2J", "category": "code", "other": 1}
    _ = file.write_text(json.dumps(first) + "\n" + json.dumps({"prompt": "c", "id": 7}) + "\n")
    one, two = read_prompts(file)
    assert (one.name, one.category, one.text) == ("x?[2J", "code", "a\nb")
    assert (two.name, two.category) == ("7", "")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", None, "there is no such file"),
        ("a.txt", b" \n\n", "holds no prompt"),
        ("a.txt", b"good\nb\xffd\n", "line 2 is not UTF-8"),
        ("a.jsonl", b'{"prompt": "good"}\n{"prompt"\n', "line 2 is not JSON"),
        ("a.jsonl", b"\n" + b"[" * 100_000, "line 2 is not JSON"),
        ("a.jsonl", b'"good"\n', "line 1 is not an object"),
        ("a.jsonl", b'{"text": "good"}\n', "line 1: prompt is missing"),
        ("a.jsonl", b'{"prompt": 7}\n', "line 1: prompt is not a text"),
        ("a.jsonl", b'{"prompt": " "}\n', "line 1: prompt is empty"),
        ("a.jsonl", b'{"prompt": "a", "category": []}\n', "line 1: category is not a text"),
    ],
)
def test_a_prompts_file_with_a_fault_is_refused_with_its_line(
    tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    if content is not None:
        _ = (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidSettings) as refused:
        _ = read_prompts(tmp_path / name)
    assert says in refused.value.message
    assert refused.value.message.startswith("--prompts ")
