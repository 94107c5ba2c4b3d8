"""Decoding speed on the demo model in one run: ours with fixed and adaptive K against mlx-lm.

    python bench/decode.py [--repeats 15] [--dtype bfloat16] [--model FOLDER] [--sets demo,low]
        [--k 3]

Fixed K are 0 to `--k`, at most 7, which also limits adaptive K.

Every repeat runs all arms once, in an order that rotates, so that a machine whose speed drifts
slows all of them; figures are medians of the ratios within a repeat. Nothing is averaged over runs.

`--grouped` adds arms whose products are computed in groups of rows, as on Macs.

Sets: `demo` (what the model was trained on, greedy), `temperature-1` (the same prompts, sampled),
`low` (words in random order under a repetition penalty, which a draft head can hardly predict).
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import mlx.core as mx
from engines import DEMO, engine_of, load_quietly, spec
from mlx_lm.generate import generate_step, stream_generate
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.utils import load as load_mlx_lm

from exo_node.mtp.types import GenerationStats, Prefilled, Sampling
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.events import AnswerEnd, Delta
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.request import Parameters
from exo_node.shard.kernels import row_groups
from exo_node.shard.kernels.row_sets import RowRange
from exo_node.shard.model.tensors import DTYPES
from exo_node_bench.spread import spread

MAX_TOKENS = 160

GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts and how they are answered; `ignore_end` makes sampled answers equally long."""

    prompts: tuple[str, ...]
    sampling: Sampling = GREEDY
    ignore_end: bool = False


DEMO_PROMPTS = ("Tell me a story.", "Who are you?", "Count from 5 to 15.", "What does ocean mean?")
LOW_PROMPTS = tuple((Path(__file__).parent / "low.txt").read_text().splitlines())
SETS: Mapping[str, PromptSet] = {
    "demo": PromptSet(DEMO_PROMPTS),
    "temperature-1": PromptSet(DEMO_PROMPTS, Sampling(temperature=1.0), ignore_end=True),
    "low": PromptSet(LOW_PROMPTS, Sampling(3.0, repetition_context_size=256), True),
}

Arm = Callable[[Sequence[int]], tuple[int, float, dict[str, int]]]
"""A prompt's ids -> (tokens after the first, seconds they took, counts)."""


def main() -> None:
    options = _options()
    engine, k_max = _engine(options.model, options.dtype, options.k)
    grouped = None
    if options.grouped:
        with _groups_forced():
            grouped, _ = _engine(options.model, options.dtype, options.k)
    baseline = MlxLm(options.model, options.dtype)
    for name in options.sets:
        _bench(options, engine, grouped, k_max, baseline, name)
    prompt = engine.codec.encode_chat([{"role": "user", "content": DEMO_PROMPTS[0]}])
    _report_costs(engine, prompt, k_max, options.repeats)


def _bench(
    options: argparse.Namespace,
    engine: TextEngine,
    grouped: TextEngine | None,
    k_max: int,
    baseline: "MlxLm",
    name: str,
) -> None:
    prompt_set = SETS[name]
    prompts = [
        engine.codec.encode_chat([{"role": "user", "content": text}]) for text in prompt_set.prompts
    ]
    arms: dict[str, Arm] = {"mlx-lm": baseline.arm(prompt_set)}
    for k in range(k_max + 1):
        arms[f"K={k}"] = _ours(engine, prompt_set, k)
    if k_max:
        arms["adaptive"] = _ours(engine, prompt_set, k_max, adaptive=True)
    if grouped is not None:
        for k in range(k_max + 1):
            arms[f"grouped K={k}"] = _ours(grouped, prompt_set, k)
    for arm in arms.values():
        _ = arm(prompts[0])  # warm-up, not counted
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    counts: dict[str, Counter[str]] = {arm: Counter() for arm in arms}
    names = list(arms)
    for repeat in range(options.repeats):
        for arm in names[repeat % len(names) :] + names[: repeat % len(names)]:
            rate, arm_counts = _run(arms[arm], prompts)
            rates[arm].append(rate)
            counts[arm].update(arm_counts)
    _report(options, name, rates, counts)


def _report_costs(engine: TextEngine, prompt: Sequence[int], k_max: int, repeats: int) -> None:
    """Prints the costs of a verify and a draft, in plain steps, each evaluated by itself."""
    if not k_max:
        return
    costs = engine.measurements.costs(prompt, k_max, repeats)
    plain = costs.verify[0]
    print("\n| K | verify of K + 1 rows, in plain steps | K drafts, in plain steps |")
    print("|---|---|---|")
    for k in range(1, k_max + 1):
        print(f"| {k} | {costs.verify[k] / plain:.2f} | {costs.draft[k - 1] / plain:.2f} |")


def _run(arm: Arm, prompts: Sequence[Sequence[int]]) -> tuple[float, dict[str, int]]:
    tokens, seconds = 0, 0.0
    total: dict[str, int] = {}
    for prompt in prompts:
        count, took, arm_counts = arm(prompt)
        tokens, seconds = tokens + count, seconds + took
        for name, value in arm_counts.items():
            total[name] = total.get(name, 0) + value
    return tokens / seconds, total


class MlxLm:
    """mlx-lm's own stream_generate on the same weights."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._model, self._tokenizer = load_mlx_lm(str(folder))[:2]
        self._model.set_dtype(DTYPES[dtype])
        mx.eval(self._model.parameters())

    def arm(self, prompt_set: PromptSet) -> Arm:
        s = prompt_set.sampling
        penalty = s.repetition_penalty
        processors = make_logits_processors(
            repetition_penalty=None if penalty == 1 else penalty,
            repetition_context_size=s.repetition_context_size,
        )
        # Without end tokens there is no text to follow: its bare loop, to its advantage.
        step = partial(generate_step, model=self._model)
        if not prompt_set.ignore_end:
            step = partial(_stream, self._model, self._tokenizer)

        def arm(prompt: Sequence[int]) -> tuple[int, float, dict[str, int]]:
            tokens, first, last = 0, 0.0, 0.0
            for _ in step(
                prompt=mx.array(list(prompt)),
                max_tokens=MAX_TOKENS,
                sampler=make_sampler(temp=s.temperature),
                logits_processors=processors,
            ):
                last = time.perf_counter()
                first = first or last
                tokens += 1
            return tokens - 1, last - first, {}

        return arm


def _stream(model: Any, tokenizer: Any, **options: Any) -> Iterator[Any]:
    return stream_generate(model, tokenizer, **options)


def _ours(engine: TextEngine, prompt_set: PromptSet, k: int, *, adaptive: bool = False) -> Arm:
    def arm(prompt: Sequence[int]) -> tuple[int, float, dict[str, int]]:
        request = Parameters(
            name="bench",
            attempt=1,
            prompt=prompt,
            sampling=prompt_set.sampling,
            limits=pb.Limits(max_tokens=MAX_TOKENS, ignore_eos=prompt_set.ignore_end),
            drafting=pb.Drafting(
                num_draft_tokens=k,
                drafting_reason="" if k else "the benchmark's plain arm",
                adaptive_draft=adaptive,
            ),
        )
        tokens, first, last = 0, 0.0, 0.0
        counts: dict[str, int] = {}
        for event in engine.generate(request):
            match event:
                case Delta():
                    last = time.perf_counter()
                    if not first:
                        first = last
                    else:
                        tokens += len(event.round.tokens)
                case AnswerEnd():
                    counts = _counts(event.stats)
                case Prefilled() | _:
                    pass
        return tokens, last - first, counts

    return arm


def _counts(stats: GenerationStats) -> dict[str, int]:
    by_depth = {f"K={k}": rounds for k, rounds in enumerate(stats.draft_k_histogram)}
    return by_depth | {
        "rounds": stats.spec_decode_rounds,
        "proposed": stats.proposed_draft_tokens,
        "accepted": stats.accepted_draft_tokens,
    }


def _engine(folder: Path, dtype: str, most: int) -> tuple[TextEngine, int]:
    """The engine, and K at most: 0 without a head."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    layers = config.get("text_config", config)["num_hidden_layers"]
    shape: dict[str, Any] = {"num_layers": layers, "dtype": dtype, "prefill_chunk": 512}
    stage_spec = spec(folder, end=layers, native_mtp=True, max_draft_tokens=most, **shape)
    loaded = load_quietly(stage_spec)
    engine = engine_of(loaded, stage_spec)
    engine.measurements.measure()  # as a runner does: adaptive drafting starts from its costs
    return engine, most if loaded.head is not None else 0


@contextmanager
def _groups_forced() -> Generator[None]:
    """Loads compute 1 to 12 rows of a product as 2 to 12, as from the M3 on; here none needs it."""
    forced: dict[str, Callable[..., Any]] = {
        "may_depend_on_rows": lambda: True,
        "measure": lambda *_: RowRange(2, 12),
        "_lost_s": lambda *_: 0.0,
    }
    own = {name: getattr(row_groups, name) for name in forced}
    try:
        for name, function in forced.items():
            setattr(row_groups, name, function)
        yield
    finally:
        for name, function in own.items():
            setattr(row_groups, name, function)


def _report(
    options: argparse.Namespace,
    name: str,
    rates: dict[str, list[float]],
    counts: dict[str, Counter[str]],
) -> None:
    def ratio(of: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(rates[of], rates[to], strict=True))

    print(f"\n{platform.machine()} {platform.system()}, {mx.default_device()}", end=", ")
    print(f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}, Python {platform.python_version()}")
    print(f"{options.model.name}, {options.dtype}, set {name}: {len(SETS[name].prompts)} prompts")
    print(f"of up to {MAX_TOKENS} tokens, {options.repeats} repeats, medians (least to most)\n")
    print("| arm | tok/s | vs mlx-lm | vs K=0 | accepted | tokens/round | round, in plain steps |")
    print("|---|---|---|---|---|---|---|")
    for arm, row in rates.items():
        line = (
            f"| {arm} | {spread(row):.1f} | {ratio(arm, 'mlx-lm'):.3f} | {ratio(arm, 'K=0'):.3f} |"
        )
        if (c := counts[arm])["rounds"]:
            # A round emits its accepted drafts and one token more; what it costs follows from both.
            per_round = 1 + c["accepted"] / c["rounds"]
            cost = "" if arm == "adaptive" else f"{per_round / ratio(arm, 'K=0'):.2f}"
            line += f" {c['accepted'] / c['proposed']:.1%} | {per_round:.2f} | {cost} |"
        else:
            line += " | | |"
        print(line)
    fixed = [arm for arm in rates if arm.startswith("K=")]
    best = max(fixed, key=lambda arm: ratio(arm, "K=0"))
    if "adaptive" in rates:
        c = counts["adaptive"]
        depths = ", ".join(f"{c[k]} at {k}" for k in fixed)
        print(f"\nadaptive is {ratio('adaptive', best):.3f} of the best fixed K ({best}); ", end="")
        print(f"its rounds: {depths}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    _ = parser.add_argument("--repeats", type=int, default=15)
    _ = parser.add_argument("--k", type=int, choices=range(8), default=3, help="K at most")
    _ = parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    _ = parser.add_argument("--model", type=Path, default=DEMO)
    _ = parser.add_argument("--grouped", action="store_true", help="also with rows in groups")
    _ = parser.add_argument("--sets", type=lambda text: text.split(","), default=list(SETS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
