"""The time to the first token of a conversation's second turn, by where its first turn is cached.

    python bench/prefix_tiers.py 27B:4 [--rows 32768] [--turn 200] [--tokens 16] [--repeats 3]
        [--k 0] [--memory 16] [--folder DIR]

A model of random weights in a shape of bench/shapes.py, as one engine on a compute thread like a
runner's. Each repeat has a prompt of `--rows` ids of its own and a second turn, which is the
prompt, its answer and `--turn` more ids:

    cold            the prompt, of which nothing is cached
    second, cold    the second turn without the prefix cache: the reference of the others
    memory          the second turn after the prompt's state in memory
    disk            the same with the memory tier emptied; files are in the system's page cache
    disk, unread    the same with the files dropped from the page cache (Linux)
    restart         the same in a new process, whose weights are made again from the same seed

Before the first repeat each process answers one prompt without the cache: of `--rows` ids in the
first process, of 600 in the second, so that its first repeat is the first long prompt of the
process. It ends with status 1 if a second turn has other ids or log-probabilities than the
reference, or was not answered from the tier that its arm names.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from exo_node.shard.model import loader_import  # before MLX, so that products of our own may be

# isort: split
import mlx.core as mx
from drafting_clients import EngineClient
from shape_engine import NoText, shape_engine

from exo_node.mtp.types import Sampling
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.compute import ComputeThread
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.engine.prefixes.disk import PrefixDisk
from exo_node.shard.engine.request import Parameters
from exo_node.shard.model.stage_model import StageModel
from exo_node_bench.spread import spread

LOADER = loader_import.__name__
SEED = 20
CHUNK = 512
TURN_END = 2
OPENING = (5, 6, 7)
"""Ids between the end of a user's turn and the answer, as a chat template has them."""
SHORT = 600
WARM_ARMS = {"memory": "memory", "disk": "disk", "disk, unread": "disk", "restart": "disk"}
"""Tiers that answer a second turn, by arm."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One answer. `rows`: of its prompt; `cached_rows` of them came from `tier`."""

    arm: str
    repeat: int
    first_s: float
    rows: int
    cached_rows: int
    tier: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def summary(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["logprobs"]
        first = {"first_s": round(self.first_s, 3), "first_logprob": self.logprobs[0]}
        return fields | first | {"ids": list(self.ids[:4])}


@dataclass(frozen=True, slots=True)
class StoredStates:
    """Bytes of one prompt's states, and the time that writing them took."""

    memory_bytes: int
    disk_bytes: int
    files: int
    write_s: float


@dataclass(slots=True)
class TierReport:
    """Results of one process."""

    load_s: float
    measurements: list[Measurement] = field(default_factory=list[Measurement])
    storage: list[StoredStates] = field(default_factory=list[StoredStates])


class TieredEngine:
    """An engine with prefixes in memory and on disk."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._compute = ComputeThread()
        self._folder = Path(options.folder)
        self.disk: PrefixDisk | None = None
        began_at = time.perf_counter()
        self.engine = self.run(self._load)
        self.report = TierReport(time.perf_counter() - began_at)

    def _load(self) -> TextEngine:
        options = self._options
        _ = mx.random.seed(SEED)
        plan = EngineOptions(
            "bfloat16",
            options.rows + options.turn + 4 * options.tokens + 1024,
            prefill_chunk=CHUNK,
            max_draft_tokens=options.k,
            prefix_cache_bytes=options.memory << 30,
        )
        codec = NoText(frozenset([TURN_END]))
        engine = shape_engine(options.shape, plan, 1.0, codec=codec, make_disk=self._make_disk)
        engine.measurements.measure()
        return engine

    def _make_disk(self, stage: StageModel) -> PrefixDisk:
        key = f"{self._options.shape}, seed {SEED}, K={self._options.k}"
        self.disk = PrefixDisk(self._folder, key, 1 << 40, stage.make_caches, self._options.shape)
        return self.disk

    def run(self, job: Any) -> Any:
        """The result of a job on the compute thread."""
        return self._compute.submit(job).result()

    def answer(self, arm: str, repeat: int, prompt: Sequence[int], *, cache: bool) -> Measurement:
        """Answers one prompt and records it, unless its repeat is -1."""
        k, name = self._options.k, f"{arm} {repeat}"
        reason = "" if k else "asked"
        request = Parameters(
            name,
            1,
            prompt,
            Sampling(),
            pb.Limits(max_tokens=self._options.tokens, ignore_eos=True),
            pb.Drafting(num_draft_tokens=k, drafting_reason=reason),
            pb.Output(top_logprobs=0),
            pb.Sharing(cache=cache),
        )
        client, began_at = EngineClient(request), time.perf_counter()
        client.drive(self._compute, self.engine)
        client.wait()
        assert client.last_event is not None
        stats = client.last_event.stats
        logprobs = (token.logprob for round_ in client.rounds for token in round_.logprobs)
        measurement = Measurement(
            arm,
            repeat,
            client.times[0] - began_at,
            len(prompt),
            stats.cached_tokens,
            stats.cached_tier,
            tuple(client.ids),
            tuple(logprobs),
        )
        if repeat >= 0:
            self.report.measurements.append(measurement)
        print(json.dumps(measurement.summary()), flush=True)
        return measurement

    def write(self) -> None:
        """Writes the marked states, as a runner does while it is idle."""
        began_at, before, files = time.perf_counter(), self._disk_bytes(), len(self._files())
        while self.run(self.engine.save_prefix):
            time.sleep(0.005)
        write_s = time.perf_counter() - began_at
        memory, disk = self.engine.prefix_cache_bytes, self._disk_bytes() - before
        storage = StoredStates(memory, disk, len(self._files()) - files, write_s)
        self.report.storage.append(storage)
        print(json.dumps(asdict(storage)), flush=True)

    def forget(self) -> None:
        """Empties the memory tier."""
        self.run(self.engine._prefixes.memory.evict)  # pyright: ignore[reportPrivateUsage]

    def drop_pages(self) -> None:
        """Drops the files from the system's page cache."""
        for path in self._files():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._compute.close()

    def _files(self) -> list[Path]:
        return list(self._folder.glob("*/*.safetensors"))

    def _disk_bytes(self) -> int:
        assert self.disk is not None
        return self.disk.size


def measure_tiers(options: argparse.Namespace) -> TierReport:
    """All arms of one process, which writes the files."""
    subject = TieredEngine(options)
    _ = subject.answer("first of the process", -1, _prompt(options.rows, "warm-up"), cache=False)
    for repeat in range(options.repeats):
        subject.forget()
        prompt = _prompt(options.rows, f"prompt {repeat}")
        answer = subject.answer("cold", repeat, prompt, cache=True).ids
        subject.write()
        second = _second_turn(options, repeat, answer)
        _ = subject.answer("second, cold", repeat, second, cache=False)
        _ = subject.answer("memory", repeat, second, cache=True)
        subject.forget()
        _ = subject.answer("disk", repeat, second, cache=True)
        subject.forget()
        if hasattr(os, "posix_fadvise"):
            subject.drop_pages()
            _ = subject.answer("disk, unread", repeat, second, cache=True)
    subject.close()
    return subject.report


def measure_restart(options: argparse.Namespace, answers: Sequence[Sequence[int]]) -> TierReport:
    """The second turns in a process that has only the files. `answers`: to the prompts."""
    subject = TieredEngine(options)
    _ = subject.answer("first of the process", -1, _prompt(SHORT, "warm-up"), cache=False)
    for repeat, answer in enumerate(answers):
        second = _second_turn(options, repeat, answer)
        _ = subject.answer("restart", repeat, second, cache=True)
    subject.close()
    return subject.report


def main() -> int:
    options = _options()
    print(f"{mx.default_device()}, {options}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        options.folder = options.folder or scratch
        first = _in_new_process(measure_tiers, options)
        answers = [each.ids for each in first.measurements if each.arm == "cold"]
        second = _in_new_process(measure_restart, options, answers)
    measurements = [*first.measurements, *second.measurements]
    print(f"loaded in {first.load_s:.0f} s, after the restart in {second.load_s:.0f} s")
    for line in _table(measurements):
        print(line)
    for name in ("memory_bytes", "disk_bytes", "files", "write_s"):
        print(f"{name}: {statistics.median(getattr(each, name) for each in first.storage):.6g}")
    faults = faults_of(measurements)
    print("\n".join(faults) or "all second turns have the cold one's ids and log-probabilities")
    return 1 if faults else 0


def _in_new_process(work: Callable[..., TierReport], *arguments: Any) -> TierReport:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_report, args=(sender, work, *arguments))
    process.start()
    sender.close()  # or the end of a process that failed would not be noticed
    try:
        return receiver.recv()
    except EOFError:
        sys.exit("a process ended without a report")
    finally:
        process.join()


def _send_report(sender: Connection, work: Callable[..., TierReport], *arguments: Any) -> None:
    sender.send(work(*arguments))
    _ = sys.stdout.flush()
    os._exit(0)  # without waiting for MLX's threads, as a runner


def _table(measurements: Sequence[Measurement]) -> list[str]:
    """Medians, and the least and most, of each arm."""
    lines = ["| arm | first token, s | rows | of these cached |", "|---|---|---|---|"]
    for arm in dict.fromkeys(each.arm for each in measurements):
        own = [each for each in measurements if each.arm == arm]
        seconds = spread([each.first_s for each in own])
        lines.append(f"| {arm} | {seconds:.3f} | {own[0].rows} | {own[0].cached_rows} |")
    return lines


def faults_of(measurements: Sequence[Measurement]) -> list[str]:
    """Second turns that differ from the reference of their repeat, or have another tier."""
    cold = {each.repeat: each for each in measurements if each.arm == "second, cold"}
    faults = list[str]()
    for each in measurements:
        if each.arm not in WARM_ARMS:
            continue
        expected = cold[each.repeat]
        if each.tier != WARM_ARMS[each.arm]:
            faults.append(f"{each.arm} {each.repeat}: answered from {each.tier or 'no cache'}")
        if (each.ids, each.logprobs) != (expected.ids, expected.logprobs):
            faults.append(f"{each.arm} {each.repeat}: another answer than the cold one")
    return faults


def _prompt(rows: int, name: str) -> list[int]:
    draw = random.Random(name)
    ids = (draw.randrange(8, 4000) for _ in range(rows - 1 - len(OPENING)))
    return [*ids, TURN_END, *OPENING]


def _second_turn(options: argparse.Namespace, repeat: int, answer: Sequence[int]) -> list[int]:
    first = _prompt(options.rows, f"prompt {repeat}")
    return [*first, *answer, TURN_END, *_prompt(options.turn, f"turn {repeat}")]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    _ = add("shape", help="NAME:BITS of bench/shapes.py")
    _ = add("--rows", type=int, default=32_768, help="ids of each prompt")
    _ = add("--turn", type=int, default=200, help="ids of the second turn")
    _ = add("--tokens", type=int, default=16, help="of each answer")
    _ = add("--repeats", type=int, default=3)
    _ = add("--k", type=int, default=0, help="drafts a round")
    _ = add("--memory", type=int, default=16, help="GiB for prefixes and requests")
    _ = add("--folder", help="of the files; default: a temporary one")
    return parser.parse_args()


if __name__ == "__main__":
    status = main()
    _ = sys.stdout.flush()
    os._exit(status)  # without waiting for MLX's threads, as a runner
