"""Measures what writing prefixes to disk costs running answers.

    python bench/prefix_writes.py [--repeats 15] [--clients 2] [--turns 3] [--first 150]
        [--added 130] [--tokens 64] [--k 2]

Two nodes, one as it starts and one with EXO_PREFIX_DISK_GB=0, answer the same conversations one
after the other; another one begins each time. The turns of all conversations begin at about the
same time, and pauses between them are about as long as a runner needs to notice that it is idle, so
that files are written in the pauses and writes are given up for the next turn.

Tokens a second are those of all answers over the time in which at least one was in progress. On a
busy machine they say little: the second ratio is of tokens for each second of CPU that the runner
had in that time, in which a write beside an answer would show. Ends with status 1 if ids differ,
or if a repeat wrote nothing.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import conversations
import psutil
from conversations import Message, TurnAnswer, ask, with_answer, words
from nodes import Node, node

HEAD = "| repeat | tokens/s with files | without | ratio | ratio by CPU time | written, MB |"
STAGGER_S = 0.15
PAUSE_S = (0.1, 0.9)
SETTLE_S = 1.5
"""Longer than the rest of a repeat's files takes: the other node's turn must not meet it."""


@dataclass(frozen=True, slots=True)
class Load:
    """All answers of one node within a repeat."""

    answers: Sequence[TurnAnswer]
    cpu_s: float
    """CPU time of the runner while answers were in progress."""

    @property
    def per_second(self) -> float:
        """Tokens for each second in which at least one answer was in progress."""
        return self._tokens / covered_s((each.began_at, each.ended_at) for each in self.answers)

    @property
    def per_cpu_second(self) -> float:
        return self._tokens / self.cpu_s

    @property
    def ids(self) -> list[tuple[int, ...]]:
        return [each.ids for each in self.answers]

    @property
    def _tokens(self) -> int:
        return sum(each.completion_tokens for each in self.answers)


def main() -> int:
    parser = argparse.ArgumentParser(description="The cost of writing prefixes to disk")
    _ = parser.add_argument("--repeats", type=int, default=15)
    _ = parser.add_argument("--clients", type=int, default=2)
    _ = parser.add_argument("--turns", type=int, default=3)
    _ = parser.add_argument("--first", type=int, default=150, help="tokens of a first turn, about")
    _ = parser.add_argument("--added", type=int, default=130, help="tokens of a later turn, about")
    _ = parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    _ = parser.add_argument("--k", type=int, default=2, help="fixed: adaptive K follows from times")
    options = parser.parse_args()
    is_right, ratios, cpu_ratios = True, list[float](), list[float]()
    print(HEAD + "\n" + "|---" * HEAD.count(" | ") + "|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        flags = ("--no-mdns", *conversations.long_model(folder / "models"))
        with (
            node(folder / "with", *flags) as writing,
            node(folder / "without", *flags, env={"EXO_PREFIX_DISK_GB": "0"}) as plain,
        ):
            for warm_up in (writing, plain):
                _ = _load(warm_up, options, "warm-up")
            for repeat in range(options.repeats):
                nodes = [writing, plain] if repeat % 2 else [plain, writing]
                before = _bytes_written(writing)
                loads = {each.data_dir: _load(each, options, f"{repeat}") for each in nodes}
                written = _bytes_written(writing) - before
                mine, theirs = loads[writing.data_dir], loads[plain.data_dir]
                is_right = is_right and written > 0 and mine.ids == theirs.ids
                ratios.append(mine.per_second / theirs.per_second)
                cpu_ratios.append(mine.per_cpu_second / theirs.per_cpu_second)
                print(
                    f"| {repeat} | {mine.per_second:.1f} | {theirs.per_second:.1f} "
                    f"| {ratios[-1]:.3f} | {cpu_ratios[-1]:.3f} | {written / 1e6:.1f} |",
                    flush=True,
                )
    print(f"with files over without: tokens a second {_shown(ratios)}")
    print(f"tokens for each second of CPU {_shown(cpu_ratios)}")
    print(f"all written, same ids: {is_right}")
    return 0 if is_right else 1


def _shown(ratios: Sequence[float]) -> str:
    lower, median, upper = statistics.quantiles(ratios, n=4)
    ends = f"{min(ratios):.3f} to {max(ratios):.3f}"
    return f"median {median:.3f}, quartiles {lower:.3f} to {upper:.3f}, {ends}"


def _load(running: Node, options: argparse.Namespace, seed: str) -> Load:
    """All turns of all conversations of a repeat."""
    draw = random.Random(seed)
    names = [f"{seed}/{client}" for client in range(options.clients)]
    messages = [[{"role": "user", "content": words(options.first, name)}] for name in names]
    answers, cpu_s = list[TurnAnswer](), 0.0

    def delayed(delay_s: float, turn: Sequence[Message]) -> TurnAnswer:
        time.sleep(delay_s)
        return ask(running, turn, options.tokens, num_draft_tokens=options.k)

    with ThreadPoolExecutor(options.clients) as pool:
        for turn in range(options.turns):
            delays = [draw.uniform(0, STAGGER_S) for _ in names]
            pause_s = draw.uniform(*PAUSE_S)
            cpu_s -= _runner_cpu_s(running)
            turn_answers = list(pool.map(delayed, delays, messages))
            cpu_s += _runner_cpu_s(running)
            answers += turn_answers
            messages = [
                with_answer(each, answer.text, words(options.added, f"{name}/{turn}"))
                for each, answer, name in zip(messages, turn_answers, names, strict=True)
            ]
            time.sleep(pause_s)
    time.sleep(SETTLE_S)
    return Load(answers, cpu_s)


def _runner_cpu_s(running: Node) -> float:
    """CPU time that the runner has had; 0 before the model is loaded."""
    times = [psutil.Process(stage["pid"]).cpu_times() for stage in running.stages()]
    return sum(each.user + each.system for each in times)


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
