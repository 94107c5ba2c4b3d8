"""Copied drafts over several nodes: the same ids, kills included, and what they give or cost.

    python bench/split_lookup.py ids [--model copies] [--bounds 0,2,4] [--tokens 20000]
    python bench/split_lookup.py speed [--model copies] [--bounds 0,2,4] [--kind prose]

Each stage is a runner process of its own, held to one core (in turn, where there are fewer). Both
arms are answered by the same runners; `plain` copies nothing. The prompts are those of
`bench/prompt_lookup.py`: `copies` edits a file, `demo` tells prose that repeats nothing, and tells
again what its prompt holds.

`ids` compares greedy and seeded answers, and kills a runner within every fourth: another takes its
place, and the answer resumes by its log. It ends with status 1 if an id differs. `speed` takes the
median of the ratios within a repeat, the order of arms in turn.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import prompt_lookup as whole
from engines import engine_of, load_quietly
from runners import Placement, running

from exo_node.placement.errors import ExoNodeError
from exo_node.proto import peer_pb2 as pb

SAMPLINGS = {
    "greedy": pb.Sampling(top_p=1.0),
    "seeded": pb.Sampling(top_p=1.0, temperature=0.7, seed=3),
}
KILL_EVERY = 4


@dataclass(slots=True)
class Told:
    """An answer of one or several attempts."""

    rounds: list[pb.Round] = field(default_factory=list[pb.Round])
    times: list[float] = field(default_factory=list[float])
    """When each token arrived."""
    stats: pb.Stats = field(default_factory=pb.Stats)
    cpu_s: float = 0.0
    """Seconds of CPU of all runners."""

    @property
    def ids(self) -> list[int]:
        return [token for each in self.rounds for token in each.tokens]

    def rate(self, *, by_cpu: bool) -> float:
        """Tokens a second after the first, or of CPU, which other programs disturb less."""
        seconds = self.cpu_s if by_cpu else self.times[-1] - self.times[0]
        return (len(self.times) - 1) / seconds


async def tell(
    placement: Placement,
    prompt: Sequence[int],
    told: Told,
    *,
    kill_after: int = -1,
    **fields: object,
) -> None:
    """Continues `told` to its end; kills a stage after so many rounds of this attempt."""
    request = placement.request(prompt, **({"ignore_eos": False} | fields))
    request.replay.extend(told.rounds)
    async for event in placement.generate(request):
        match event.WhichOneof("event"):
            case "delta":
                told.rounds.append(event.delta.round)
                told.times += [time.perf_counter()] * len(event.delta.round.tokens)
                kill_after -= 1
                if kill_after == 0:
                    stage = placement.processes[
                        -1 - len(told.rounds) % (len(placement.processes) - 1)
                    ]
                    psutil.Process(stage.pid).kill()
            case "finished":
                told.stats = event.finished.stats
            case _:
                pass


async def answer(
    placement: Placement,
    prompt: Sequence[int],
    tokens: int,
    sampling: pb.Sampling,
    *,
    lookup: bool,
    kill_after: int = -1,
) -> Told:
    """An answer that survives the kill of one of its stages."""
    told, name = Told(), f"bench-{time.monotonic_ns()}"
    for attempt in count(1):
        try:
            await tell(
                placement,
                prompt,
                told,
                kill_after=kill_after if attempt == 1 else -1,
                request=name,
                attempt=attempt,
                max_tokens=tokens,
                sampling=sampling,
                prompt_lookup=lookup,
                drafting_reason="",
            )
        except ExoNodeError as fault:
            if attempt > 3:
                raise
            print(f"  after {len(told.ids)} ids: {fault.message}", flush=True)
            for stage, process in enumerate(placement.processes):
                if not psutil.pid_exists(process.pid) or process in placement.exited:
                    await placement.restart(stage)
                    await measured(placement)
        else:
            return told
    raise AssertionError


async def measured(placement: Placement) -> None:
    """Waits until every stage has measured its copies: all do while nothing runs."""
    hold(placement)
    await asyncio.sleep(3)


def hold(placement: Placement) -> None:
    """Holds each runner to a core of its own, as far as there are enough."""
    cores = psutil.Process().cpu_affinity()
    for number, runner in enumerate(placement.processes):
        psutil.Process(runner.pid).cpu_affinity([cores[number % len(cores)]])


def prompts_of(model: str) -> dict[str, list[list[int]]]:
    spec = whole.spec(model, native_mtp=False)
    return whole.cases(engine_of(load_quietly(spec), spec), model)


async def compare_ids(placement: Placement, model: str, least: int) -> int:
    """Returns the number of answers whose ids are not those of plain decoding."""
    prompts = [prompt for each in prompts_of(model).values() for prompt in each]
    tokens, draw = 4 * whole.LINES if model == "copies" else whole.TOKENS, random.Random(5)
    compared = copied = kills = different = 0
    for number in count():
        if compared >= least and copied and kills:
            break
        prompt = prompts[number // len(SAMPLINGS) % len(prompts)]
        name, sampling = list(SAMPLINGS.items())[number % len(SAMPLINGS)]
        plain = await answer(placement, prompt, tokens, sampling, lookup=False)
        kill_after = draw.randrange(2, 40) if number % KILL_EVERY == 0 else -1
        told = await answer(placement, prompt, tokens, sampling, lookup=True, kill_after=kill_after)
        kills += told.stats.resumes
        compared, copied = compared + len(told.ids), copied + told.stats.lookup_accepted_tokens
        if told.ids != plain.ids:
            different += 1
            print(f"differs: {name}, answer {number}", flush=True)
        print(
            f"{compared} ids compared, {copied} copied, {kills} kills, {different} different",
            flush=True,
        )
    return different


def cpu_of(placement: Placement) -> float:
    return sum(sum(psutil.Process(each.pid).cpu_times()[:2]) for each in placement.processes)


async def compare_speeds(
    placement: Placement, model: str, repeats: int, kinds: Sequence[str], *, by_cpu: bool
) -> int:
    """Returns the number of answers whose ids differ."""
    different, tokens = 0, 4 * whole.LINES if model == "copies" else whole.TOKENS
    for kind, prompts in prompts_of(model).items():
        if kinds and kind not in kinds:
            continue
        ratios, rates = list[float](), {False: list[float](), True: list[float]()}
        copied = total = 0
        for repeat in range(repeats + 1):
            for number, prompt in enumerate(prompts):
                told = dict[bool, Told]()
                for lookup in (False, True) if (repeat + number) % 2 else (True, False):
                    before = cpu_of(placement)
                    told[lookup] = await answer(
                        placement, prompt, tokens, SAMPLINGS["greedy"], lookup=lookup
                    )
                    told[lookup].cpu_s = cpu_of(placement) - before
                different += told[True].ids != told[False].ids
                if repeat == 0:
                    continue  # warm-up
                for lookup, each in told.items():
                    rates[lookup].append(each.rate(by_cpu=by_cpu))
                ratios.append(rates[True][-1] / rates[False][-1])
                copied += told[True].stats.lookup_accepted_tokens
                total += len(told[True].ids)
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{kind}: plain {statistics.median(rates[False]):.1f}, lookup "
            f"{statistics.median(rates[True]):.1f} tokens/s; ratio {middle:.3f} "
            f"({low:.3f} to {high:.3f}); {copied} of {total} tokens copied",
            flush=True,
        )
    print(f"{different} answers are not plain decoding's", flush=True)
    return different


async def run(options: argparse.Namespace) -> int:
    layers = whole.LAYERS[options.model]
    bounds = [int(each) for each in options.bounds.split(",")] if options.bounds else []
    bounds = bounds or [0, layers // 2, layers]
    assert bounds[-1] == layers and all(a < b for a, b in pairwise(bounds)), bounds
    changes = {"prompt_lookup": True, "context_length": 8192}
    async with running(bounds, whole.MODELS[options.model], **changes) as placement:
        await measured(placement)
        print(json.dumps({"bounds": bounds, "model": options.model}), flush=True)
        if options.what == "ids":
            return await compare_ids(placement, options.model, options.tokens)
        by_cpu, kinds = options.clock == "cpu", options.kind
        return await compare_speeds(placement, options.model, options.repeats, kinds, by_cpu=by_cpu)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    _ = parser.add_argument("what", choices=("ids", "speed"))
    _ = parser.add_argument("--model", choices=tuple(whole.LAYERS), default="copies")
    _ = parser.add_argument("--bounds", default="", help="first layers of stages, and the layers")
    _ = parser.add_argument("--tokens", type=int, default=20_000)
    _ = parser.add_argument("--repeats", type=int, default=15)
    _ = parser.add_argument("--kind", action="append", default=[], help="of text; default: all")
    _ = parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    return 1 if asyncio.run(run(parser.parse_args())) else 0


if __name__ == "__main__":
    sys.exit(main())
