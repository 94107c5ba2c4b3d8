"""What it costs an answer that every stage sends copies of its state to a warm spare.

    python bench/spares.py [--turns 6]

Four real nodes on loopback, three stages of the demo model, with one spare each and without, in
turns; the ratios are those of the medians. Spares are busy on the same machine here, so this is the
most that it costs.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))

from laboratory import Laboratory, laboratory
from listening import ask
from trials import NEVER_END, questions

TOKENS = 256
ANSWERS = 2
"""Of each turn."""
SETTLE_S = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description="What spares that follow cost")
    _ = parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    speeds: dict[int, list[float]] = defaultdict(list)
    reading: dict[int, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch, laboratory(Path(scratch)) as lab:
        for turn in range(options.turns):
            # Each goes first as often as the other.
            for spares in (1, 0) if turn % 2 else (0, 1):
                _place(lab, spares)
                speeds[spares] += [_speed(lab) for _ in range(ANSWERS)]
                reading[spares].append(_reading_s(lab))
    print("| | without | with spares | ratio |")
    print("|---|---|---|---|")
    print(_row("tokens/s", speeds))
    print(_row("seconds to the first token, a prompt of two chunks", reading))


def _place(lab: Laboratory, spares: int) -> None:
    lab.spares = spares
    _ = lab.place(spares=spares)
    _ = lab.until_whole()
    time.sleep(SETTLE_S)


def _speed(lab: Laboratory) -> float:
    fields = {"max_tokens": TOKENS, **NEVER_END}
    answer = ask(lab.node(lab.head()), "Tell me a story.", **fields)
    assert answer.ended(120) and not answer.error, answer.error
    return (TOKENS - 1) / sum(answer.gaps()[1:])


def _reading_s(lab: Laboratory) -> float:
    prompt = next(q.prompt for q in questions() if q.name == "long prompt")
    answer = ask(lab.node(lab.head()), prompt, max_tokens=4, **NEVER_END)
    assert answer.ended(120) and not answer.error, answer.error
    return answer.gaps()[0]


def _row(name: str, measured: dict[int, list[float]]) -> str:
    off, on = (statistics.median(measured[spares]) for spares in (0, 1))
    return f"| {name} | {off:.2f} | {on:.2f} | {on / off:.3f} |"


if __name__ == "__main__":
    main()
