"""Clients at once at a model with a draft head: default requests against `num_draft_tokens` 0.

    python bench/drafting_clients.py demo [--clients 1,2,8] [--prompt 300] [--tokens 96]
        [--repeats 5]
    python bench/drafting_clients.py 27B:4 --prompt 1012 --tokens 128 [--layers 0.05]
        [--context 32768]
    python bench/drafting_clients.py demo --beside 3000

Each repeat answers with both kinds of requests, in turn, in one process that holds one engine, on
a compute thread like a runner's; the first kind alternates. No prompt is cached. Ratios are taken
within a repeat: tokens a second from the first request to the last end, and, for a busy
machine without a GPU, tokens for each second of CPU time that this process had.
`first_s` is the time to the first and to the last client's first token. A warm-up of each comes
before, in which the engine measures the costs of drafts for that many clients.

A shape has the memory that a node would plan for `--context` tokens, and MLX's limit as a runner
has it. `memory` of a kind, and of what is measured at load, is in GB, see `memory_watch.py`.

A shape (see bench/shapes.py) has random weights. Its layers are scaled by `--layers`, so that the
last token decides most of the next one, and its head drafts from that token alone: the less
the layers count, the more drafts are right (`accepted`). It ends with status 1 if a default answer
has other ids than one without drafts although the engine's probes found all equal.

`--beside ROWS` measures the speed of an answer without drafts while a prompt of ROWS rows is read,
and the time of that prompt alone and beside the answer.
"""

import argparse
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from exo_node.shard.model import loader_import  # before MLX, so that products of our own may be

# isort: split
import mlx.core as mx
from engines import load_quietly, spec
from memory_watch import MemoryWatch
from shape_engine import shape_engine
from shapes import SHAPES

from exo_node.mtp.types import Round, Sampling
from exo_node.node.placements.stage_specs import memory_limit
from exo_node.placement.cost import HEADROOM
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.events import AnswerEnd, Delta
from exo_node.shard.engine.answers.text_engine import AnswerHandle, TextEngine
from exo_node.shard.engine.compute import ComputeThread
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.engine.request import Parameters
from exo_node_bench.spread import spread

LOADER = loader_import.__name__
KINDS = ("default", "K=0")
MAX_K = 7
ENDLESS = 10**9


@dataclass(slots=True)
class EngineClient:
    """One request and its results; times in seconds of one clock."""

    request: Parameters
    rounds: list[Round] = field(default_factory=list[Round])
    times: list[float] = field(default_factory=list[float])
    last_event: AnswerEnd | None = None
    fault: BaseException | None = None
    over: threading.Event = field(default_factory=threading.Event)
    run: AnswerHandle | None = None

    def drive(self, compute: ComputeThread, engine: TextEngine) -> None:
        """Starts the answer."""
        self.run = engine.drive(compute, self.request, self.take, self.end)

    def take(self, event: object) -> None:
        if self.run is not None:
            self.run.acknowledge()  # it is never slow
        if isinstance(event, Delta):
            self.times.append(time.perf_counter())
            self.rounds.append(event.round)
        elif isinstance(event, AnswerEnd):
            self.last_event = event

    @property
    def ids(self) -> list[int]:
        return [token for each in self.rounds for token in each.tokens]

    def end(self, fault: BaseException | None) -> None:
        self.fault = fault
        self.over.set()

    def wait(self) -> None:
        """Returns at the end of the answer. Raises its fault."""
        _ = self.over.wait()
        if self.fault is not None:
            raise self.fault


@dataclass(frozen=True, slots=True)
class KindRun:
    """All clients' answers of one kind."""

    clients: list[EngineClient]
    start: float
    cpu_s: float
    """CPU time of this process until the last end."""
    memory: dict[str, float]
    """See `MemoryWatch.figures`."""
    reason: str
    """Why the last round drafted as many tokens as it did."""

    @property
    def tokens(self) -> int:
        return sum(len(client.ids) for client in self.clients)

    @property
    def rate(self) -> float:
        """Tokens a second from the first request to the last end."""
        ended = max(client.times[-1] for client in self.clients)
        return self.tokens / (ended - self.start)

    @property
    def cpu_rate(self) -> float:
        """Tokens for each second of CPU time."""
        return self.tokens / self.cpu_s

    @property
    def first(self) -> list[float]:
        return sorted(client.times[0] - self.start for client in self.clients)

    @property
    def behind_first(self) -> float:
        """A client's tokens a second after its first one, in the median."""
        return statistics.median(
            (len(c.ids) - 1) / (c.times[-1] - c.times[0]) for c in self.clients if len(c.ids) > 1
        )

    def summary(self) -> dict[str, Any]:
        stats = [client.last_event.stats for client in self.clients if client.last_event]
        drafted = sum(each.proposed_draft_tokens for each in stats)
        rounds = [sum(counts) for counts in zip(*(_counts(s) for s in stats), strict=True)]
        return {
            "tokens_s": round(self.rate, 1),
            "tokens_cpu_s": round(self.cpu_rate, 1),
            "first_s": [round(self.first[0], 2), round(self.first[-1], 2)],
            "behind_first_s": round(self.behind_first, 1),
            "accepted": round(sum(s.accepted_draft_tokens for s in stats) / max(1, drafted), 2),
            "rounds_by_k": rounds,
            "depth_reason": self.reason,
            "memory": self.memory,
        }


def main() -> int:
    options = _options()
    compute = ComputeThread()
    engine = compute.submit(lambda: _engine(options)).result()
    with MemoryWatch() as watch:
        compute.submit(engine.measurements.measure).result()
    print(json.dumps({"measuring": watch.figures}), flush=True)
    drafts, batches = engine.measurements.identity, engine.measurements.batch_identity
    bitwise = drafts == batches == "bitwise"
    print(f"{mx.default_device()}: drafts {drafts}, batches {batches}")
    if options.beside:
        for repeat in range(-1, options.repeats):
            print(json.dumps(_beside(compute, engine, options, repeat)), flush=True)
        compute.close()
        return 0
    same = True
    for count in options.clients:
        for kind in KINDS:
            run = _run(compute, engine, _requests(options, count, -1, kind))
            print(json.dumps({"clients": count, "first": kind, "memory": run.memory}), flush=True)
        pairs = list[dict[str, KindRun]]()
        for repeat in range(options.repeats):
            runs = {
                kind: _run(compute, engine, _requests(options, count, repeat, kind))
                for kind in (KINDS if repeat % 2 else KINDS[::-1])
            }
            pairs.append(runs)
            same = same and len({_ids(run) for run in runs.values()}) == 1
            summaries = {kind: run.summary() for kind, run in runs.items()}
            print(json.dumps({"clients": count} | summaries), flush=True)
        print(f"{count} clients, default / K=0: {_ratios(pairs)}; same ids: {same}", flush=True)
    compute.close()
    return 1 if bitwise and not same else 0


def _beside(
    compute: ComputeThread, engine: TextEngine, options: argparse.Namespace, repeat: int
) -> dict[str, float]:
    """An answer's tokens a second alone and while a prompt is read, and the prompt's seconds."""
    draw = random.Random(f"beside {repeat}")

    def start_client(name: str, rows: int, tokens: int) -> EngineClient:
        prompt = [draw.randrange(3, 4000) for _ in range(rows)]
        limits = pb.Limits(max_tokens=tokens, ignore_eos=True)
        drafting = pb.Drafting(drafting_reason="asked")
        fields = f"{name}{repeat}", 1, prompt, Sampling(), limits, drafting
        client = EngineClient(Parameters(*fields))
        client.drive(compute, engine)
        return client

    def time_prompt(name: str) -> float:
        start = time.perf_counter()
        client = start_client(name, options.beside, 1)
        _ = client.over.wait()
        return client.times[0] - start

    alone_s = time_prompt("alone")
    answer = start_client("answer", options.prompt, ENDLESS)
    while len(answer.times) < options.tokens:
        time.sleep(0.01)
    start = time.perf_counter()
    beside_s = time_prompt("beside")
    tokens_beside = sum(start <= at <= start + beside_s for at in answer.times)
    before = answer.times[options.tokens // 2 : options.tokens]
    assert answer.run is not None
    answer.run.cancel()
    rate = (len(before) - 1) / (before[-1] - before[0])
    return {
        "alone_tokens_s": round(rate, 1),
        "beside_tokens_s": round(tokens_beside / beside_s, 1),
        "kept": round(tokens_beside / beside_s / rate, 2),
        "prompt_alone_s": round(alone_s, 2),
        "prompt_beside_s": round(beside_s, 2),
    }


def _ratios(pairs: Sequence[dict[str, KindRun]]) -> str:
    """Medians over repeats, and their spread."""
    parts = list[str]()
    for name, value in (("tokens", attrgetter("rate")), ("per CPU s", attrgetter("cpu_rate"))):
        ratios = [float(value(runs["default"]) / value(runs["K=0"])) for runs in pairs]
        parts.append(f"{name} {spread(ratios):.3f}")
    return ", ".join(parts)


def _run(compute: ComputeThread, engine: TextEngine, requests: Sequence[Parameters]) -> KindRun:
    # Neither kind must find prefixes of the other.
    compute.submit(engine._prefixes.memory.evict).result()  # pyright: ignore[reportPrivateUsage]
    clients, start, cpu = (
        [EngineClient(each) for each in requests],
        time.perf_counter(),
        time.process_time(),
    )
    with MemoryWatch() as watch:
        for client in clients:
            client.drive(compute, engine)
        for client in clients:
            client.wait()
    reason = engine.drafting.depth_reason
    return KindRun(clients, start, time.process_time() - cpu, watch.figures, reason)


def _requests(
    options: argparse.Namespace, clients: int, repeat: int, kind: str
) -> list[Parameters]:
    """The same prompts for both kinds."""
    k = MAX_K if kind == "default" else 0
    requests = list[Parameters]()
    for client in range(clients):
        draw = random.Random(f"{clients} {repeat} {client}")
        prompt = [draw.randrange(3, 4000) for _ in range(options.prompt)]
        name = f"{clients}/{repeat}/{client}/{kind}"
        limits = pb.Limits(max_tokens=options.tokens, ignore_eos=True)
        reason = "" if k else "asked"
        drafting = pb.Drafting(num_draft_tokens=k, drafting_reason=reason, adaptive_draft=k > 0)
        requests.append(Parameters(name, 1, prompt, Sampling(), limits, drafting))
    return requests


def _counts(stats: Any) -> list[int]:
    counts = list(stats.draft_k_histogram)
    return counts + [0] * (MAX_K + 1 - len(counts))


def _ids(run: KindRun) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(client.ids) for client in run.clients)


def _engine(options: argparse.Namespace) -> TextEngine:
    if options.model == "demo":
        engine = _demo(options)
    else:
        plan = _engine_options(options, "bfloat16")
        engine = shape_engine(options.model, plan, options.layers)
        _limit_memory(options, plan)
    return engine


def _limit_memory(options: argparse.Namespace, plan: EngineOptions) -> None:
    """Limits MLX as a runner does, by the planner's figure for the weights that are loaded."""
    mx.clear_cache()
    shape = SHAPES[options.model.partition(":")[0]]
    caches = shape["num_hidden_layers"] // shape["full_attention_interval"] + 1  # the head's
    row = caches * 4 * shape["num_key_value_heads"] * shape["head_dim"]
    over, under = HEADROOM
    planned = (mx.get_active_memory() + plan.context_length * row) * over // under
    limit = memory_limit(planned, 0)
    _ = mx.set_memory_limit(limit)
    print(f"plan {planned / 1e9:.2f} GB, MLX's limit {limit / 1e9:.2f} GB", flush=True)


def _engine_options(options: argparse.Namespace, dtype: str) -> EngineOptions:
    context = max(options.clients) * (options.prompt + options.tokens + 64)
    context = options.context or max(context, 2 * options.beside + 8192)
    return EngineOptions(
        dtype,
        max(4400, context),
        prefill_chunk=512 if options.model != "demo" else 256,
        max_draft_tokens=MAX_K,
        prefix_cache_bytes=options.prefixes << 20,
    )


def _demo(options: argparse.Namespace) -> TextEngine:
    loaded = load_quietly(spec(native_mtp=True))
    return TextEngine(loaded, _engine_options(options, "float32"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    _ = add("model", help="demo, or NAME:BITS of bench/shapes.py")
    _ = add("--clients", type=_numbers, default=(1, 8))
    _ = add("--prompt", type=int, default=300, help="ids of each prompt")
    _ = add("--tokens", type=int, default=96, help="of each answer")
    _ = add("--repeats", type=int, default=5)
    _ = add("--beside", type=int, default=0, help="rows of a prompt that is read beside an answer")
    _ = add("--prefixes", type=int, default=4096, help="MiB for prefixes and requests; 0: none")
    _ = add("--context", type=int, default=0, help="tokens of the plan; 0: as clients need")
    _ = add("--layers", type=float, default=0.05, help="how much a shape's layers count")
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


if __name__ == "__main__":
    status = main()
    _ = sys.stdout.flush()
    os._exit(status)  # without waiting for MLX's threads, as a runner
