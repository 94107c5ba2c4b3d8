"""Measures what writing prefixes to disk costs running answers.

    python bench/prefix_writes.py [--repeats 15] [--clients 2] [--turns 3] [--first 150]
        [--added 130] [--tokens 64]

Two nodes, one as it starts and one with EXO_PREFIX_DISK_GB=0, answer the same conversations one
after the other; another one begins each time. The turns of all conversations begin at about the
same time, and pauses between them are about as long as a runner needs to notice that it is idle, so
that files are written in the pauses and writes are given up for the next turn. Tokens a second
are those of all answers over the time in which at least one was in progress. Ends with status 1 if
ids differ, or if a repeat wrote nothing.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import conversations
from conversations import Message, TurnAnswer, ask, with_answer, words
from nodes import Node, node

STAGGER_S = 0.15
PAUSE_S = (0.1, 0.9)
SETTLE_S = 1.5
"""Longer than the rest of a repeat's files takes: the other node's turn must not meet it."""


def main() -> int:
    parser = argparse.ArgumentParser(description="The cost of writing prefixes to disk")
    _ = parser.add_argument("--repeats", type=int, default=15)
    _ = parser.add_argument("--clients", type=int, default=2)
    _ = parser.add_argument("--turns", type=int, default=3)
    _ = parser.add_argument("--first", type=int, default=150, help="tokens of a first turn, about")
    _ = parser.add_argument("--added", type=int, default=130, help="tokens of a later turn, about")
    _ = parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    options = parser.parse_args()
    ratios, is_right = list[float](), True
    print("| repeat | with files | without | ratio | written, MB |\n" + "|---" * 5 + "|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        flags = ("--no-mdns", *conversations.long_model(folder / "models"))
        with (
            node(folder / "with", *flags) as writing,
            node(folder / "without", *flags, env={"EXO_PREFIX_DISK_GB": "0"}) as plain,
        ):
            for warm_up in (writing, plain):
                _ = _conversations(warm_up, options, "warm-up")
            for repeat in range(options.repeats):
                nodes = [writing, plain] if repeat % 2 else [plain, writing]
                before = _bytes_written(writing)
                answers = {
                    each.data_dir: _conversations(each, options, f"{repeat}") for each in nodes
                }
                with_files, without = answers[writing.data_dir], answers[plain.data_dir]
                written = _bytes_written(writing) - before
                is_same = [each.ids for each in with_files] == [each.ids for each in without]
                is_right = is_right and is_same and written > 0
                rates = _rate(with_files), _rate(without)
                ratios.append(rates[0] / rates[1])
                print(
                    f"| {repeat} | {rates[0]:.1f} | {rates[1]:.1f} | {ratios[-1]:.3f} "
                    f"| {written / 1e6:.1f} |",
                    flush=True,
                )
    lower, median, upper = statistics.quantiles(ratios, n=4)
    print(
        f"tokens a second with files over without: median {median:.3f}, quartiles {lower:.3f} to "
        f"{upper:.3f}, {min(ratios):.3f} to {max(ratios):.3f}; all written, same ids: {is_right}"
    )
    return 0 if is_right else 1


def _conversations(running: Node, options: argparse.Namespace, seed: str) -> list[TurnAnswer]:
    """All turns of all conversations."""
    draw = random.Random(seed)
    names = [f"{seed}/{client}" for client in range(options.clients)]
    messages = [[{"role": "user", "content": words(options.first, name)}] for name in names]
    answers = list[TurnAnswer]()

    def delayed(delay_s: float, turn: Sequence[Message]) -> TurnAnswer:
        time.sleep(delay_s)
        return ask(running, turn, options.tokens)

    with ThreadPoolExecutor(options.clients) as pool:
        for turn in range(options.turns):
            delays = [draw.uniform(0, STAGGER_S) for _ in names]
            pause_s = draw.uniform(*PAUSE_S)
            turn_answers = list(pool.map(delayed, delays, messages))
            answers += turn_answers
            messages = [
                with_answer(each, answer.text, words(options.added, f"{name}/{turn}"))
                for each, answer, name in zip(messages, turn_answers, names, strict=True)
            ]
            time.sleep(pause_s)
    time.sleep(SETTLE_S)
    return answers


def _rate(answers: Sequence[TurnAnswer]) -> float:
    """Tokens for each second in which at least one answer was in progress."""
    tokens = sum(each.completion_tokens for each in answers)
    return tokens / covered_s((each.began_at, each.ended_at) for each in answers)


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans of time."""
    seconds, covered_until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        seconds += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
    return seconds


def _bytes_written(running: Node) -> int:
    return sum(path.stat().st_size for path in running.data_dir.glob("prefixes/*/*"))


if __name__ == "__main__":
    sys.exit(main())
