"""A pipeline of runners on this machine against one runner and mlx-lm's own ring, in one run.

    python bench/pipeline.py [--repeats 15] [--tokens 64] [--dtype bfloat16] [--model FOLDER]

Every repeat runs all arms once, in an order that rotates; figures are medians, and ratios are
medians of the ratios within a repeat. `bench/README.md` describes the arms.
"""

import argparse
import asyncio
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))

from engines import DEMO
from pipeline_peer import MlxRing
from runners import Placement, running

from exo_node_bench.spread import spread

CHUNK = 16
"""Rows of a prefill chunk, on both sides."""
LONG_PROMPT = 8 * CHUNK
IN_FLIGHT = (4, 8)
SINGLY = ", singly"
"""Each request has its own forwards (`EXO_BATCHING_ENABLED=0`); without it they share them."""
PROMPT = (1, 9, 73, 512, 40, 7, 3000, 88, 250, 19, 4, 61, 1024)


@dataclass(frozen=True, slots=True)
class ArmTurn:
    """One turn of an arm: tokens a second, and the CPU time of its processes."""

    ids: tuple[int, ...]
    rate: float
    cores: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class PipelineArm:
    """A measurement that runs once in every repeat, by the processes `pids`."""

    pids: tuple[int, ...]
    run: Callable[[], Awaitable[tuple[Sequence[int], float]]]

    async def turn(self) -> ArmTurn:
        processes = [psutil.Process(pid) for pid in self.pids]
        start, before = time.perf_counter(), _busy(processes)
        ids, rate = await self.run()
        used = _busy(processes) - before
        return ArmTurn(tuple(ids), rate, used / (time.perf_counter() - start), used)


def main() -> None:
    asyncio.run(_main(_options()))


async def _main(options: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        arms = await _open(stack, options)
        for arm in arms.values():
            _ = await arm.turn()  # warm-up, not counted
        turns: dict[str, list[ArmTurn]] = {name: [] for name in arms}
        names = list(arms)
        for repeat in range(options.repeats):
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                turns[name].append(await arms[name].turn())
    _report(options, turns)


async def _open(stack: AsyncExitStack, options: argparse.Namespace) -> dict[str, PipelineArm]:
    folder, dtype, layers = options.model, options.dtype, options.layers
    changes = {"dtype": dtype, "prefill_chunk": CHUNK}
    arms: dict[str, PipelineArm] = {}
    for stages in (1, 2, 3):
        bounds = _bounds(layers, stages)
        placement = await stack.enter_async_context(running(bounds, folder, **changes))
        arms |= _ours(placement, stages, options.tokens)
        if stages > 1:
            arms |= _several(placement, stages, options.tokens, "")
            singly = await stack.enter_async_context(
                running(bounds, folder, **changes, batching=False)
            )
            arms |= _several(singly, stages, options.tokens, SINGLY)
    for ranks in (1, 2, 3):
        peer = await stack.enter_async_context(MlxRing.open(folder, dtype, ranks))
        arms |= _rings(peer, ranks, options.tokens)
    return arms


def _ours(placement: Placement, stages: int, tokens: int) -> dict[str, PipelineArm]:
    pids = tuple(process.pid for process in placement.processes)
    long = [PROMPT[i % len(PROMPT)] for i in range(LONG_PROMPT)]

    async def decode() -> tuple[Sequence[int], float]:
        ids, times = await _answer(placement, PROMPT, tokens)
        return ids, (len(times) - 1) / (times[-1] - times[0])

    async def prefill() -> tuple[Sequence[int], float]:
        start = time.perf_counter()
        ids, times = await _answer(placement, long, 1)
        return ids, LONG_PROMPT / (times[0] - start)

    name = f"{stages} {'stages' if stages > 1 else 'stage'}"
    return {
        f"decode, {name}": PipelineArm(pids, decode),
        f"prefill, {name}": PipelineArm(pids, prefill),
    }


def _several(placement: Placement, stages: int, tokens: int, how: str) -> dict[str, PipelineArm]:
    pids = tuple(process.pid for process in placement.processes)

    def arm(requests: int) -> PipelineArm:
        async def several() -> tuple[Sequence[int], float]:
            """Tokens a second while all of them decode."""
            answers = await asyncio.gather(
                *(_answer(placement, PROMPT, tokens) for _ in range(requests))
            )
            first, last = max(t[0] for _, t in answers), min(t[-1] for _, t in answers)
            inside = sum(first < when <= last for _, times in answers for when in times)
            return [i for ids, _ in answers for i in ids], inside / (last - first)

        return PipelineArm(pids, several)

    return {f"decode, {stages} stages, {n} in flight{how}": arm(n) for n in IN_FLIGHT}


def _rings(peer: MlxRing, ranks: int, tokens: int) -> dict[str, PipelineArm]:
    long = [PROMPT[i % len(PROMPT)] for i in range(LONG_PROMPT)]

    async def decode() -> tuple[Sequence[int], float]:
        answer = await peer.answer(PROMPT, tokens, CHUNK)
        return answer.ids, (len(answer.ids) - 1) / answer.rest_s

    async def prefill() -> tuple[Sequence[int], float]:
        answer = await peer.answer(long, 1, CHUNK)
        return answer.ids, LONG_PROMPT / answer.first_s

    name = f"mlx-lm ring of {ranks}" if ranks > 1 else "mlx-lm"
    return {
        f"decode, {name}": PipelineArm(peer.pids, decode),
        f"prefill, {name}": PipelineArm(peer.pids, prefill),
    }


async def _answer(
    placement: Placement, prompt: Sequence[int], tokens: int
) -> tuple[list[int], list[float]]:
    """Greedy ids without drafts, and when each arrived here."""
    ids, times = list[int](), list[float]()
    request = placement.request(prompt, max_tokens=tokens, ignore_eos=True)
    async for event in placement.generate(request):
        if event.WhichOneof("event") == "delta":
            ids += event.delta.round.tokens
            times += [time.perf_counter()] * len(event.delta.round.tokens)
    return ids, times


def _busy(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _bounds(layers: int, stages: int) -> list[int]:
    """mlx-lm's split: the last stages get the remaining layers."""
    base, extra = divmod(layers, stages)
    bounds = [0]
    for stage in range(stages):
        bounds.append(bounds[-1] + base + (stage >= stages - extra))
    return bounds


# ---- the report


def _report(options: argparse.Namespace, turns: Mapping[str, Sequence[ArmTurn]]) -> None:
    print(f"{platform.machine()} {platform.system()}, {psutil.cpu_count()} cores", end=", ")
    print(f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}, grpcio {version('grpcio')}", end=", ")
    print(f"Python {platform.python_version()}; {options.model.name}, {options.dtype}")
    print(f"{options.repeats} repeats, medians (least-most)\n")
    for phase in ("decode", "prefill"):
        _table(phase, {name: row for name, row in turns.items() if name.startswith(phase)})
    _ratios(turns)


def _table(phase: str, turns: Mapping[str, Sequence[ArmTurn]]) -> None:
    reference = turns[f"{phase}, 1 stage"]
    print(f"\n| {phase} | tok/s | of one stage | cores busy | CPU ms a token | same ids |")
    print("|---|---|---|---|---|---|")
    for name, row in turns.items():
        rate = f"{spread([turn.rate for turn in row]):.1f}"
        cores = statistics.median(turn.cores for turn in row)
        tokens = LONG_PROMPT if phase == "prefill" else len(row[0].ids)
        spent = 1e3 * min(turn.cpu_s for turn in row) / tokens
        same = _same_ids(row, reference)
        print(
            f"| {name.removeprefix(phase + ', ')} | {rate} | {_ratio(row, reference):.3f} "
            f"| {cores:.2f} | {spent:.1f} | {'yes' if same else 'no'} |"
        )


def _ratios(turns: Mapping[str, Sequence[ArmTurn]]) -> None:
    phases, sizes = ("decode", "prefill"), (2, 3)
    pairs = [(f"{p}, {n} stages", f"{p}, mlx-lm ring of {n}") for p in phases for n in sizes]
    for n in sizes:
        for several in (f"decode, {n} stages, {count} in flight" for count in IN_FLIGHT):
            pairs += [(several, f"decode, {n} stages"), (several, several + SINGLY)]
    print("\n| ratio | median (least-most) |\n|---|---|")
    for of, to in pairs:
        each = [a.rate / b.rate for a, b in zip(turns[of], turns[to], strict=True)]
        print(f"| {of} / {to} | {spread(each):.3f} |")


def _ratio(row: Sequence[ArmTurn], reference: Sequence[ArmTurn]) -> float:
    return statistics.median(a.rate / b.rate for a, b in zip(row, reference, strict=True))


def _same_ids(row: Sequence[ArmTurn], reference: Sequence[ArmTurn]) -> bool:
    expected = reference[0].ids
    size = len(expected)
    return all(
        turn.ids[at : at + size] == expected for turn in row for at in range(0, len(turn.ids), size)
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    _ = parser.add_argument("--repeats", type=int, default=15)
    _ = parser.add_argument("--tokens", type=int, default=64)
    _ = parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    _ = parser.add_argument("--model", type=Path, default=DEMO)
    _ = parser.add_argument("--layers", type=int, default=16, help="that the model has")
    return parser.parse_args()


if __name__ == "__main__":
    main()
