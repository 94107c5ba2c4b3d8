"""Answers on stand-ins for Apple's chips, ids and log-probabilities, against K = 0 alone there.

    python bench/chip_identity.py [--tokens N] [--output FILE]

Each chip serves each shape in each precision, after few rows and across its borders of attention:
greedy and seeded, with K 1 to 3, in batches of 2 to 8, with copies, resumed, after a cached prefix,
and in two stages. Log-probabilities are compared bit for bit. Exit status 1 if any token or
log-probability differs. Tiny random checkpoints; times mean nothing.
"""

import argparse
import itertools
import platform
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))

from chip_answers import (
    BORDERS,
    EXPERTS,
    PRECISIONS,
    SHAPES,
    Compared,
    Served,
    checkpoint_of,
    differing,
)
from chips import Chip, on_chip

from exo_node.shard.kernels import row_sets


def places(names: Sequence[str]) -> Iterator[tuple[Chip, str, str, int]]:
    """Chip, shape, precision, and the rows of prompts, or 0: few."""
    for shape, precision, chip in itertools.product(SHAPES, PRECISIONS, BORDERS):
        if chip.name in names and not (precision == "bfloat16" and shape in EXPERTS):
            for rows in (0, *BORDERS[chip]):
                yield chip, shape, precision, rows


@dataclass(slots=True)
class Counts:
    """Of one chip."""

    tokens: int = 0
    ids: int = 0
    """Those that differ."""
    logprobs: int = 0

    def add(self, place: str, compared: Compared) -> None:
        how, _, plain = compared
        ids, logprobs = differing(compared)
        if ids or logprobs:
            print(f"differs: {place}, {how}: {ids} ids, {logprobs} log-probabilities", flush=True)
        self.tokens, self.ids = self.tokens + len(plain), self.ids + ids
        self.logprobs += logprobs


def main() -> int:
    parser = argparse.ArgumentParser(description="Answers on stand-ins for Apple's chips")
    _ = parser.add_argument("--tokens", type=int, default=20_000, help="the least for each chip")
    _ = parser.add_argument("--chips", help="only these, separated by commas")
    _ = parser.add_argument("--output", type=Path, help="a file for the table")
    options = parser.parse_args()
    row_sets.VALUES = 64  # a coarse deviation shows in each
    names = options.chips.split(",") if options.chips else [chip.name for chip in BORDERS]
    counts = {name: Counts() for name in names}
    with tempfile.TemporaryDirectory() as folder:
        order = list(places(names))
        random.Random(0).shuffle(order)  # a short run has some of everything
        for number, (chip, shape, precision, rows) in enumerate(itertools.cycle(order)):
            if all(each.tokens >= options.tokens for each in counts.values()):
                break
            if (count := counts[chip.name]).tokens >= options.tokens:
                continue
            place = f"{chip.name}, {shape}, {precision}, {rows} rows, {number}"
            checkpoint = checkpoint_of(Path(folder), shape)
            with on_chip(chip):
                for each in Served(checkpoint, precision, rows).answers(number):
                    count.add(place, each)
            print(f"{place}: {count}", flush=True)
    table = _table(counts)
    print(table)
    if options.output:
        _ = options.output.write_text(table + "\n")
    return any(each.ids or each.logprobs for each in counts.values())


def _table(counts: dict[str, Counts]) -> str:
    lines = [
        "# Answers on stand-ins for Apple's chips, against K = 0 alone",
        "",
        f"`python bench/chip_identity.py` on {platform.machine()}, mlx {version('mlx')}, mlx-lm "
        f"{version('mlx-lm')}.",
        "",
        "| chip | tokens | other ids | other log-probabilities |",
        "|---|---|---|---|",
    ]
    lines += [f"| {n} | {c.tokens:,} | {c.ids} | {c.logprobs} |" for n, c in counts.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
