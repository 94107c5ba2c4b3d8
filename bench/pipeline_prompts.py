"""How long answers wait for a prompt that shares their pipeline, and the prompt for them.

    python bench/pipeline_prompts.py [--rows 2048] [--chunk 256] [--answers 3] [--stages 2]
        [--prompts 1] [--repeats 3] [--dtype float32] [--batch-first]

Every repeat times the prompts alone, then the answers alone, then both: the longest gap of any
answer while the prompts are read, in chunks (the time of one chunk of the prompt alone),
tokens a second of all answers, and the time to the first token. Ids must be those of the request
alone. `--batch-first`: one more prompt, in the background, comes first.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engines import DEMO
from runners import Placement, running

WORDS = (1, 9, 73, 512, 40, 7, 3000, 88, 250, 19, 4, 61, 1024)
ALONE_S = 4.0
HEAD = (
    "| repeat | first token alone, s | beside, s | ratio | chunk, s | gap alone, s | beside, s "
    "| chunks | tok/s alone | beside | same ids |"
)


@dataclass(slots=True)
class TimedAnswer:
    """The ids of an answer and the times of their arrival."""

    ids: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])

    def gap(self, since: float, until: float) -> float:
        """The longest time without a token in between."""
        inside = [since, *(when for when in self.times if since < when < until), until]
        return max(b - a for a, b in itertools.pairwise(inside))

    def tokens(self, since: float, until: float) -> int:
        return sum(since < when <= until for when in self.times)


def main() -> int:
    return asyncio.run(_main(_options()))


async def _main(options: argparse.Namespace) -> int:
    stages, layers = options.stages, 16
    bounds = [layers * i // stages for i in range(stages + 1)]
    shape = {
        "dtype": options.dtype,
        "prefill_chunk": options.chunk,
        "context_length": 4 * (options.rows + 1024) * (options.prompts + 1),
    }
    async with running(bounds, DEMO, **shape) as placement:
        _ = await _read(placement, WORDS, 8)
        print(HEAD + "\n" + "|---" * (HEAD.count(" | ") + 1) + "|", flush=True)
        results = [await _repeat(placement, options, number) for number in range(options.repeats)]
    ratios, chunks, sound = zip(*results, strict=True)
    print(f"median: first token beside / alone {statistics.median(ratios):.2f}, ", end="")
    print(f"gap {statistics.median(chunks):.2f} chunks")
    return 0 if all(sound) else 1


async def _repeat(
    placement: Placement, options: argparse.Namespace, number: int
) -> tuple[float, float, bool]:
    prompts = [_prompt(options.rows, 7 * number + i) for i in range(options.prompts)]
    short = [_prompt(len(WORDS) + i, i) for i in range(options.answers)]
    start = time.perf_counter()
    alone = await asyncio.gather(*(_read(placement, prompt, 4) for prompt in prompts))
    first_alone = max(each.times[0] for each in alone) - start
    quiet = await _answers(placement, short)
    await asyncio.sleep(ALONE_S)
    end = time.perf_counter()
    since = end - ALONE_S + 1.0
    gap_alone = max(a.gap(since, end) for a in quiet.answers)
    rate_alone = sum(a.tokens(since, end) for a in quiet.answers) / (end - since)
    background = [_prompt(options.rows, 99)] if options.batch_first else []
    behind = [
        asyncio.create_task(_read(placement, prompt, 1, background=True)) for prompt in background
    ]
    start = time.perf_counter()
    read = await asyncio.gather(*(_read(placement, prompt, 4) for prompt in prompts))
    end = max(each.times[0] for each in read)
    first = end - start
    gap = max(a.gap(start, end) for a in quiet.answers)
    rate = sum(a.tokens(start, end) for a in quiet.answers) / first
    _ = await asyncio.gather(*behind)
    await quiet.stop()
    sound = [a.ids for a in read] == [a.ids for a in alone]
    for prompt, quiet_answer in zip(short, quiet.answers, strict=True):
        reference = await _read(placement, prompt, len(quiet_answer.ids))
        sound = sound and reference.ids == quiet_answer.ids
    chunk = first_alone / (options.prompts * -(-options.rows // options.chunk))
    row = (first_alone, first, first / first_alone, chunk, gap_alone, gap, gap / chunk)
    cells = [number, *(f"{x:.2f}" for x in row), f"{rate_alone:.1f}", f"{rate:.1f}", sound]
    print("| " + " | ".join(str(x) for x in cells) + " |", flush=True)
    return first / first_alone, gap / chunk, sound


@dataclass(slots=True)
class _Running:
    """Answers that continue until they are stopped."""

    answers: list[TimedAnswer]
    tasks: "list[asyncio.Task[None]]"

    async def stop(self) -> None:
        for task in self.tasks:
            assert not task.done(), "an answer ended too soon: ask for fewer rows"
            _ = task.cancel()
        _ = await asyncio.gather(*self.tasks, return_exceptions=True)


async def _answers(placement: Placement, prompts: Sequence[Sequence[int]]) -> _Running:
    """Starts answers; returns once all of them decode."""
    answers = [TimedAnswer() for _ in prompts]
    tasks = [
        asyncio.create_task(_into(answer, placement, prompt, 3000))
        for answer, prompt in zip(answers, prompts, strict=True)
    ]
    while not all(len(answer.ids) > 2 for answer in answers):
        await asyncio.sleep(0.01)
    return _Running(answers, tasks)


async def _read(
    placement: Placement, prompt: Sequence[int], tokens: int, *, background: bool = False
) -> TimedAnswer:
    answer = TimedAnswer()
    await _into(answer, placement, prompt, tokens, background=background)
    return answer


async def _into(
    answer: TimedAnswer,
    placement: Placement,
    prompt: Sequence[int],
    tokens: int,
    *,
    background: bool = False,
) -> None:
    request = placement.request(prompt, max_tokens=tokens, ignore_eos=True, background=background)
    async for event in placement.generate(request):
        if event.WhichOneof("event") == "delta":
            answer.ids += event.delta.round.tokens
            answer.times += [time.perf_counter()] * len(event.delta.round.tokens)


def _prompt(rows: int, number: int) -> list[int]:
    """Prompts with different numbers share no prefix."""
    return [11 + number, *(WORDS[(i + number) % len(WORDS)] for i in range(rows - 1))]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    _ = parser.add_argument("--rows", type=int, default=2048)
    _ = parser.add_argument("--chunk", type=int, default=256)
    _ = parser.add_argument("--answers", type=int, default=3)
    _ = parser.add_argument("--stages", type=int, default=2)
    _ = parser.add_argument("--prompts", type=int, default=1)
    _ = parser.add_argument("--repeats", type=int, default=3)
    _ = parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"))
    _ = parser.add_argument("--batch-first", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
