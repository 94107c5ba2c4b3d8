"""Several requests that share their steps, with copied drafts and without.

    python bench/lookup_together.py [--together 4] [--together 8] [--repeats 3] [--arm plain]

The prompts of `prompt_lookup.py`: prose, answers that are asked for again, and half of each. Both
clocks run from the moment at which all requests have their first token until the last one ends; all
tokens behind that moment count. All arms run once in each repeat, in rotating order; ratios are
taken within a repeat. It ends with status 1 if an id differs from the plain arm's.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from prompt_lookup import ARMS, cases, load, open_engine, request_of, spec

from exo_node.shard.engine.events import AnswerEnd, Delta
from exo_node.shard.engine.text_engine import TextEngine


@dataclass(frozen=True, slots=True)
class Run:
    """Answers that were told together."""

    ids: tuple[tuple[int, ...], ...]
    cpu: float
    """Tokens a second of CPU time."""
    wall: float
    copied: int


def tell(engine: TextEngine, arm: str, prompts: Sequence[Sequence[int]]) -> Run:
    k, lookup = ARMS[arm]
    requests = [
        replace(request_of(prompt, k, lookup=lookup), request=f"bench-{i}")
        for i, prompt in enumerate(prompts)
    ]
    running = {i: engine.generate(each) for i, each in enumerate(requests)}
    ids: list[list[int]] = [[] for _ in prompts]
    copied, began, before = 0, (0.0, 0.0), 0
    while running:
        for i, events in list(running.items()):
            event = next(events, None)
            if isinstance(event, Delta):
                ids[i] += event.round.tokens
            elif isinstance(event, AnswerEnd):
                copied += event.stats.lookup_accepted_tokens
                del running[i]
        if not before and all(ids):
            before, began = sum(map(len, ids)), (time.process_time(), time.perf_counter())
    tokens = sum(map(len, ids)) - before
    cpu, wall = time.process_time() - began[0], time.perf_counter() - began[1]
    return Run(tuple(map(tuple, ids)), tokens / cpu, tokens / wall, copied)


def compare(engine: TextEngine, size: int, repeats: int, arms: Sequence[str]) -> int:
    """Returns the number of answers that differ from the plain arm's."""
    by_kind, different = cases(engine, "demo"), 0
    half = [
        p for pair in zip(cycle(by_kind["prose"]), by_kind["again"], strict=False) for p in pair
    ]
    for kind, prompts in {
        "prose": by_kind["prose"],
        "again": by_kind["again"],
        "half": half,
    }.items():
        chosen = list(islice(cycle(prompts), size))
        runs: dict[str, list[Run]] = {arm: [tell(engine, arm, chosen)] for arm in arms}  # warm
        for repeat in range(repeats):
            turn = repeat % len(arms)
            for arm in (*arms[turn:], *arms[:turn]):
                runs[arm].append(tell(engine, arm, chosen))
        wanted = runs[arms[0]][0].ids
        different += sum(
            a != b
            for each in runs.values()
            for r in each
            for a, b in zip(r.ids, wanted, strict=True)
        )
        for arm in arms[1:]:
            pairs = list(zip(runs[arm][1:], runs[arms[0]][1:], strict=True))
            cpu, wall = ([getattr(a, c) / getattr(b, c) for a, b in pairs] for c in ("cpu", "wall"))
            print(
                f"{size} together, {kind}: {arm}/{arms[0]} by CPU {statistics.median(cpu):.2f} "
                f"({min(cpu):.2f} to {max(cpu):.2f}), by the wall {statistics.median(wall):.2f} "
                f"({min(wall):.2f} to {max(wall):.2f}); copied {runs[arm][-1].copied} of "
                f"{sum(map(len, wanted))}",
                flush=True,
            )
    return different


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    _ = parser.add_argument("--together", type=int, action="append", default=[])
    _ = parser.add_argument("--repeats", type=int, default=3)
    _ = parser.add_argument("--arm", action="append", default=[], choices=list(ARMS))
    arguments = parser.parse_args()
    engine = open_engine(load(spec("demo"), lambda _: None), "demo")
    engine.measurements.measure()
    print(
        "batches:",
        engine.measurements.batch_identity,
        engine.lookup.shared_reason or "copies",
        flush=True,
    )
    arms = arguments.arm or list(ARMS)
    different = sum(
        compare(engine, size, arguments.repeats, arms) for size in arguments.together or (4, 8)
    )
    print(f"{different} answers differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
