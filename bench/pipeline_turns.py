"""Times a conversation's second turn on a pipeline, compared with a prompt that is all new.

    python bench/pipeline_turns.py [--rows 2048] [--chunk 256] [--stages 2] [--new 60]
        [--repeats 5] [--dtype float32]

Every repeat answers a first turn, then its second one, then a new conversation of as many rows. The
last two are answered again by a placement without a prefix cache: the ids must be the same.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engines import DEMO
from runners import Placement, running

TOKENS = 32
ROOM = 1 << 30
GENERATION = (7, 8)
"""The ids that a template puts after the last turn."""
END = 4095
"""The demo's end token."""


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The answer to one turn."""

    ids: list[int]
    first_s: float
    cached: int


def main() -> int:
    return asyncio.run(_main(_options()))


async def _main(options: argparse.Namespace) -> int:
    bounds = [16 * i // options.stages for i in range(options.stages + 1)]
    shape = {
        "dtype": options.dtype,
        "prefill_chunk": options.chunk,
        "context_length": 4 * (options.rows + 1024),
    }
    prompts, answers, ratios = list[list[int]](), list[TurnAnswer](), list[float]()
    print("| repeat | cold, s | second turn, s | ratio | rows | kept |")
    print("|---|---|---|---|---|---|", flush=True)
    async with running(bounds, DEMO, prefix_cache_bytes=ROOM, **shape) as placement:
        _ = await _ask(placement, [*_turn(300, 1), *GENERATION])
        for number in range(options.repeats):
            before = [*_turn(options.rows - 2, 100 + number), *GENERATION]
            first = await _ask(placement, before)
            second = [*before, *first.ids, END, *_turn(options.new, 200 + number), *GENERATION]
            warm = await _ask(placement, second)
            cold_turn = [*_turn(len(second) - 2, 300 + number), *GENERATION]
            cold = await _ask(placement, cold_turn)
            prompts += [second, cold_turn]
            answers += [warm, cold]
            ratios.append(warm.first_s / cold.first_s)
            row = (f"{cold.first_s:.3f}", f"{warm.first_s:.3f}", f"{ratios[-1]:.3f}")
            print(f"| {number} | {' | '.join(row)} | {len(second)} | {warm.cached} |", flush=True)
    async with running(bounds, DEMO, prefix_cache_bytes=1, **shape) as placement:
        alone = [await _ask(placement, prompt) for prompt in prompts]
    same = [each.ids for each in answers] == [each.ids for each in alone]
    none = not any(each.cached for each in alone)
    print(f"median ratio {statistics.median(ratios):.3f}, same ids: {same}, nothing kept: {none}")
    return 0 if same and none else 1


async def _ask(placement: Placement, prompt: Sequence[int]) -> TurnAnswer:
    ids, first, cached = list[int](), 0.0, 0
    start = time.perf_counter()
    request = placement.request(prompt, max_tokens=TOKENS, ignore_eos=True)
    async for event in placement.generate(request):
        match event.WhichOneof("event"):
            case "delta":
                first = first or time.perf_counter() - start
                ids += event.delta.round.tokens
            case "finished":
                cached = event.finished.stats.cached_tokens
            case _:
                pass
    return TurnAnswer(ids, first, cached)


def _turn(rows: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [*(draw.randrange(3, 4000) for _ in range(rows - 1)), END]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    _ = parser.add_argument("--rows", type=int, default=2048)
    _ = parser.add_argument("--chunk", type=int, default=256)
    _ = parser.add_argument("--stages", type=int, default=2)
    _ = parser.add_argument("--new", type=int, default=60)
    _ = parser.add_argument("--repeats", type=int, default=5)
    _ = parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
