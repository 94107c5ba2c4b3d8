"""Decoding speed on the demo model in one run: ours with K = 0..3 against mlx-lm's stream_generate.

    python bench/decode.py [--repeats 15] [--dtype bfloat16] [--model FOLDER]

Every repeat runs all arms once, in an order that rotates, so that a machine whose speed drifts
slows all of them; figures are medians of the ratios within a repeat. Nothing is averaged over runs.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.utils import load as load_mlx_lm

from exo_node.mtp.loop import Prefilled
from exo_node.mtp.types import Sampling
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine import Delta, Done, EngineRequest, TextEngine
from exo_node.shard.load import load
from exo_node.shard.wire import DTYPES

DEMO = Path(str(files("exo_node.shard"))) / "models" / "demo"
PROMPTS = ("Tell me a story.", "Who are you?", "Count from 5 to 15.", "What does ocean mean?")
MAX_TOKENS = 160

Arm = Callable[[Sequence[int]], tuple[int, float, dict[str, int]]]
"""A prompt's ids -> (tokens after the first, seconds they took, counts)."""


def main() -> None:
    options = _options()
    engine, k_max = _engine(options.model, options.dtype)
    prompts = [engine.encode([{"role": "user", "content": text}]) for text in PROMPTS]
    arms: dict[str, Arm] = {"mlx-lm": _mlx_lm(options.model, options.dtype)}
    for k in range(k_max + 1):
        arms[f"K={k}"] = _ours(engine, k)
    for arm in arms.values():
        _ = [arm(prompt) for prompt in prompts]  # warm-up, not counted
    rates: dict[str, list[float]] = {name: [] for name in arms}
    counts: dict[str, dict[str, int]] = {}
    names = list(arms)
    for repeat in range(options.repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            rate, counted = _run(arms[name], prompts)
            rates[name].append(rate)
            counts[name] = counted
    _report(options, rates, counts)
    _report_costs(engine, prompts[0], k_max, options.repeats)


def _report_costs(engine: TextEngine, prompt: Sequence[int], k_max: int, repeats: int) -> None:
    """A verify and a draft by themselves, each waited for, in plain steps that are too."""
    if not k_max:
        return
    costs = engine.measure_costs(prompt, k_max, repeats)
    plain = costs.verify[0]
    print("\n| K | verify of K + 1 rows, in plain steps | K drafts, in plain steps |")
    print("|---|---|---|")
    for k in range(1, k_max + 1):
        print(f"| {k} | {costs.verify[k] / plain:.2f} | {costs.draft[k - 1] / plain:.2f} |")


def _run(arm: Arm, prompts: Sequence[Sequence[int]]) -> tuple[float, dict[str, int]]:
    tokens, seconds = 0, 0.0
    total: dict[str, int] = {}
    for prompt in prompts:
        count, took, counted = arm(prompt)
        tokens, seconds = tokens + count, seconds + took
        for name, value in counted.items():
            total[name] = total.get(name, 0) + value
    return tokens / seconds, total


def _mlx_lm(folder: Path, dtype: str) -> Arm:
    model, tokenizer = load_mlx_lm(str(folder))[:2]
    model.set_dtype(DTYPES[dtype])
    mx.eval(model.parameters())

    def arm(prompt: Sequence[int]) -> tuple[int, float, dict[str, int]]:
        tokens, first, last = 0, 0.0, 0.0
        for _ in stream_generate(model, tokenizer, list(prompt), max_tokens=MAX_TOKENS):
            last = time.perf_counter()
            first = first or last
            tokens += 1
        return tokens - 1, last - first, {}

    return arm


def _ours(engine: TextEngine, k: int) -> Arm:
    def arm(prompt: Sequence[int]) -> tuple[int, float, dict[str, int]]:
        request = EngineRequest(
            request="bench",
            attempt=1,
            prompt=prompt,
            sampling=Sampling(),
            max_tokens=MAX_TOKENS,
            stop=(),
            k=k,
            drafting_reason="" if k else "the benchmark's plain arm",
        )
        tokens, first, last = 0, 0.0, 0.0
        counted: dict[str, int] = {}
        for event in engine.generate(request):
            match event:
                case Delta():
                    last = time.perf_counter()
                    if not first:
                        first = last
                    else:
                        tokens += len(event.round.tokens)
                case Done():
                    s = event.stats
                    counted = {
                        "rounds": s.spec_decode_rounds,
                        "proposed": s.proposed_draft_tokens,
                        "accepted": s.accepted_draft_tokens,
                    }
                case Prefilled() | _:
                    pass
        return tokens, last - first, counted

    return arm


def _engine(folder: Path, dtype: str) -> tuple[TextEngine, int]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    layers = config.get("text_config", config)["num_hidden_layers"]
    spec = pb.StageSpec(
        placement="bench",
        model=folder.name,
        num_stages=1,
        end_layer=layers,
        num_layers=layers,
        dtype=dtype,
        prefill_chunk=512,
        context_length=4096,
        native_mtp=True,
        max_draft_tokens=3,
        mtp_hidden="post_norm",
        path=str(folder),
    )
    loaded = load(spec, lambda _: None)
    assert loaded.codec is not None
    engine = TextEngine(
        loaded.codec,
        loaded.model,
        dtype=dtype,
        vocabulary=loaded.vocabulary,
        context_length=4096,
        prefill_chunk=512,
        async_draft_eval=True,
        head=loaded.head,
        max_k=3,
        link=None,
        clock=time.perf_counter,
    )
    return engine, 3 if loaded.head is not None else 0


def _report(
    options: argparse.Namespace, rates: dict[str, list[float]], counts: dict[str, dict[str, int]]
) -> None:
    def ratio(of: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(rates[of], rates[to], strict=True))

    print(f"{platform.machine()} {platform.system()}, {mx.default_device()}", end=", ")
    print(f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}, Python {platform.python_version()}")
    print(f"{options.model.name}, {options.dtype}, greedy, {len(PROMPTS)} prompts", end=", ")
    print(f"{options.repeats} repeats, medians (least to most)\n")
    print("| arm | tok/s | vs mlx-lm | vs K=0 | accepted | tokens/round | round, in plain steps |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rates.items():
        spread = f"{statistics.median(row):.1f} ({min(row):.1f}-{max(row):.1f})"
        line = f"| {name} | {spread} | {ratio(name, 'mlx-lm'):.3f} | {ratio(name, 'K=0'):.3f} |"
        if (c := counts[name]) and c["rounds"]:
            # A round emits its accepted drafts and one token more; what it costs follows from both.
            per_round = 1 + c["accepted"] / c["rounds"]
            cost = per_round / ratio(name, "K=0")
            line += f" {c['accepted'] / c['proposed']:.1%} | {per_round:.2f} | {cost:.2f} |"
        else:
            line += " | | |"
        print(line)
    print(
        "\nA round pays when it emits more tokens than it costs plain steps: the last column is "
        "the break-even number of tokens a round."
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    _ = parser.add_argument("--repeats", type=int, default=15)
    _ = parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    _ = parser.add_argument("--model", type=Path, default=DEMO)
    return parser.parse_args()


if __name__ == "__main__":
    main()
