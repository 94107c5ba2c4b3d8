"""Measures decoding, verifying, drafting and prompts on a GPU, with our kernels and with MLX's.

    python bench/gpu.py 27B:4 35B-A3B:4 [--prompt 1024] [--contexts 1100 16000]
        [--rows 1 2 3 4] [--acceptance 0.857,0.754,0.664] [--repeats 15] [--json out.json]

Random weights; acceptance is forced, as in bench/shapes.py. MLX's kernels are measured first, then
ours under the same weights in one process. `verify`: milliseconds of a forward by its number
of rows, each evaluated by itself, and its cost in forwards of one row. `ahead`: rounds that are
built while others run. `host`: the host's part of one forward: milliseconds to build its graph, to
issue it to the GPU and to wait for it, and its operations. `same_bits`: whether a verify's logits
equal those of single steps. `batch`: the same forwards for several requests at once, and whether
each computes the same as alone.
"""

import argparse
import json
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from shapes import PUBLISHED, ShapeModel, ShapeVariant

from exo_node.mtp.batch_probe import batch_identity
from exo_node.mtp.caches.batch_caches import left_aligned
from exo_node.mtp.caches.positions import Positions
from exo_node.mtp.caches.rollback import cache_arrays, with_tapes
from exo_node.mtp.pieces import result_of
from exo_node.mtp.probe import Subject
from exo_node.shard.engine.round_forms import COUNTS_ON_DEVICE
from exo_node.shard.kernels.kernel_choice import Mode

_CHUNK = 64
"""Rows of a prefill forward: our kernels for them compile sooner than MLX's for more rows."""


@dataclass(frozen=True, slots=True)
class ShapePlan:
    """The measurements of one shape."""

    repeats: int
    prompt: int
    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    """Rows of the forwards that `verify` times; 1 is always the first of them."""
    acceptance: tuple[float, ...]
    batches: tuple[int, ...]
    first_token: int
    modes: tuple[Mode, ...]
    stock_step: bool
    """With MLX's kernels, measure `generate_step` alone."""


def main() -> None:
    options = _options()
    report: dict[str, Any] = {"setting": _setting(), "command": sys.argv[1:], "shapes": []}
    print(json.dumps(report["setting"]), flush=True)
    for spec in options.shapes:
        name, _, bits = spec.partition(":")
        shares = options.acceptance or PUBLISHED.get(name, (0.8, 0.7, 0.6))
        plan = ShapePlan(
            options.repeats,
            options.prompt,
            tuple(options.contexts),
            (1, *(rows for rows in options.rows if rows > 1)),
            shares,
            tuple(options.batches),
            options.first_token,
            ("auto",) if options.only_ours or options.stock_step else ("mlx", "auto"),
            options.stock_step,
        )
        report["shapes"].append(_shape(name, int(bits or 16), plan))
        mx.clear_cache()
        if options.json:
            _ = Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Costs on a GPU, ours and MLX's")
    _ = parser.add_argument("shapes", nargs="+", help="NAME:BITS, 16 for bfloat16")
    _ = parser.add_argument("--repeats", type=int, default=15)
    _ = parser.add_argument("--prompt", type=int, default=1024, help="of decoding and drafting")
    _ = parser.add_argument(
        "--contexts",
        type=int,
        nargs="*",
        default=[1100],
        help="rows behind which is verified; with MLX's kernels only behind the prompt",
    )
    _ = parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4], help="of a verify")
    _ = parser.add_argument(
        "--batches", type=int, nargs="*", default=[], help="requests in a batch, with our kernels"
    )
    _ = parser.add_argument(
        "--first-token", type=int, default=0, help="rows of a prompt that is timed once more"
    )
    _ = parser.add_argument("--only-ours", action="store_true", help="without MLX's kernels")
    _ = parser.add_argument(
        "--stock-step",
        action="store_true",
        help="of MLX's kernels mlx-lm's own loop alone, behind one token",
    )
    _ = parser.add_argument(
        "--acceptance",
        type=lambda text: tuple(float(each) for each in text.split(",")),
        help="share of drafts accepted at K = 1, 2, ..., the largest K; default: as published",
    )
    _ = parser.add_argument("--json")
    return parser.parse_args()


def _setting() -> dict[str, Any]:
    info = mx.device_info()
    return {
        "device": info.get("device_name") or info.get("architecture"),
        "default_device": str(mx.default_device()),
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _shape(name: str, bits: int, plan: ShapePlan) -> dict[str, Any]:
    subject = ShapeModel(name, bits, plan.repeats, plan.prompt)
    arms: dict[str, dict[str, Any]] = {}
    stock = _generate_step(subject, 1) if plan.stock_step else 0.0
    for mode in plan.modes:
        start = time.perf_counter()
        chosen = subject.choose(mode)
        print(*chosen, sep="\n", flush=True)
        arm: dict[str, Any] = {"choices": [str(each) for each in chosen]}
        arm["load_s"] = round(time.perf_counter() - start, 1)
        arms[mode] = arm
        if mode == "mlx":
            arm["generate_step_tok_s"] = _generate_step(subject, min(plan.prompt, 64))
        contexts = (plan.prompt, *(() if mode == "mlx" else plan.contexts))
        arm |= _arm(subject, plan, contexts, () if mode == "mlx" else plan.batches)
        print(json.dumps({"shape": f"{name}:{bits}", mode: arm}), flush=True)
    shape: dict[str, Any] = {"shape": name, "bits": bits, **arms}
    if stock:
        shape |= {"stock_tok_s": stock, "plain_to_stock": arms["auto"]["plain_tok_s"] / stock}
        print(json.dumps({"stock_tok_s": stock, "ratio": shape["plain_to_stock"]}), flush=True)
    return shape | ({"ratios": _ratios(arms["mlx"], arms["auto"])} if "mlx" in arms else {})


def _arm(
    subject: ShapeModel, plan: ShapePlan, contexts: Sequence[int], batches: Sequence[int]
) -> dict[str, Any]:
    depth = len(plan.acceptance)
    measured = subject.measure(ShapeVariant(), depth)
    print(json.dumps(measured), flush=True)
    arm: dict[str, Any] = {key: measured[key] for key in ("kernels", "plain_tok_s", "ttft_off_s")}
    arm |= _speedups(measured, plan.acceptance)
    if set(measured["kernels"]) >= COUNTS_ON_DEVICE:
        ahead = subject.measure(ShapeVariant(ahead=1), depth)
        print(json.dumps(ahead), flush=True)
        arm["ahead"] = _speedups(ahead, plan.acceptance)
    arm["host"] = {str(rows): _host(subject, plan.prompt, rows, plan.repeats) for rows in (1, 4)}
    print(json.dumps(arm["host"]), flush=True)
    arm["verify"] = {str(n): _verify(subject, n, plan) for n in contexts}
    if batches:
        arm["batch"] = {str(size): _batch(subject, size, plan.repeats) for size in batches}
        print(json.dumps(arm["batch"]), flush=True)
        arm["batch_identity"] = _batch_identity(subject)
        print(json.dumps({"batch_identity": arm["batch_identity"]}), flush=True)
    if plan.first_token:
        arm["first_token_s"] = _first_token(subject, plan.first_token)
        print(json.dumps({"first_token_s": arm["first_token_s"]}), flush=True)
    return arm


def _speedups(measured: dict[str, Any], acceptance: Sequence[float]) -> dict[str, Any]:
    """Costs of rounds for each K, and the resulting speed at that acceptance."""
    speeds: dict[str, Any] = {}
    for k, share in enumerate(acceptance, start=1):
        costs = measured[f"K={k}"]
        cost = share * costs["accepted_all_steps"] + (1 - share) * costs["accepted_none_steps"]
        speeds[f"K={k}"] = costs | {
            "acceptance": share,
            "speedup": round((1 + share * k) / cost, 3),
            "tok_s": round((1 + share * k) / cost * measured["plain_tok_s"], 1),
        }
    return speeds


def _first_token(subject: ShapeModel, rows: int) -> float:
    """Seconds for a prompt in chunks of 512; the second of two, since the first one compiles."""
    seconds = 0.0
    for _ in range(2):
        caches, start_s = with_tapes(subject.model.make_cache()), time.perf_counter()
        for start in range(0, rows, 512):
            ids = mx.arange(start, min(start + 512, rows)) % 4000
            logits = subject.target.forward(ids, caches, want="last").logits
            mx.eval(mx.argmax(logits, axis=-1), cache_arrays(caches))
        seconds = time.perf_counter() - start_s
    return round(seconds, 3)


def _verify(subject: ShapeModel, context: int, plan: ShapePlan) -> dict[str, Any]:
    caches = _caches_of(subject, context)
    times = {rows: _forwards(subject, caches, rows, plan.repeats) for rows in plan.rows}
    result = {
        "ms": {str(rows): round(each * 1e3, 2) for rows, each in times.items()},
        "steps": {str(rows): round(each / times[1], 3) for rows, each in times.items()},
        "same_bits": _same_bits(subject, context),
    }
    print(json.dumps({"context": context} | result), flush=True)
    return result


def _caches_of(subject: ShapeModel, context: int) -> list[object]:
    """Caches with `context` rows."""
    caches = with_tapes(subject.model.make_cache())
    for start in range(0, context, _CHUNK):
        ids = mx.array([(31 * i + 7) % 4000 for i in range(start, min(start + _CHUNK, context))])
        _ = subject.target.forward(ids, caches, want="none")
        mx.eval(cache_arrays(caches))
    return caches


def _forwards(subject: ShapeModel, caches: list[object], rows: int, repeats: int) -> float:
    """Median seconds of forwards of `rows` rows, each evaluated by itself."""
    ids = mx.arange(rows) + 11
    times: list[float] = []
    for _ in range(repeats + 4):
        start = time.perf_counter()
        logits = subject.target.forward(ids, caches, want="all").logits
        mx.eval(mx.argmax(logits, axis=-1), cache_arrays(caches))
        times.append(time.perf_counter() - start)
    return statistics.median(times[4:])


def _host(subject: ShapeModel, context: int, rows: int, repeats: int) -> dict[str, Any]:
    """Medians in milliseconds, and the graph's operations with and without views."""
    caches, ids = _caches_of(subject, context), mx.arange(rows) + 11
    times: list[tuple[float, float, float]] = []
    for _ in range(repeats + 4):
        start = time.perf_counter()
        logits = subject.target.forward(ids, caches, want="all").logits
        outputs = [mx.argmax(logits, axis=-1), *cache_arrays(caches)]
        built = time.perf_counter()
        mx.async_eval(*outputs)
        issued = time.perf_counter()
        mx.synchronize()
        times.append((built - start, issued - built, time.perf_counter() - issued))
    logits = subject.target.forward(ids, caches, want="all").logits
    with tempfile.NamedTemporaryFile(suffix=".dot") as file:
        mx.export_to_dot(file.name, logits, *cache_arrays(caches))
        labels = re.findall(r'label ?= ?"(\w+)"[^\n]*rectangle', Path(file.name).read_text())
    mx.eval(logits, cache_arrays(caches))
    medians = (statistics.median(each) for each in zip(*times[4:], strict=True))
    names = ("build_ms", "encode_ms", "wait_ms")
    views = ("Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Squeeze", "Transpose")
    result = {name: round(each * 1e3, 2) for name, each in zip(names, medians, strict=True)}
    launched = sum(label not in views for label in labels)
    return result | {"operations": len(labels), "without_views": launched}


def _batch(subject: ShapeModel, size: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of batched forwards of 1 and 4 rows for each request, after 24 rows and more."""
    rows = [24 + 5 * i for i in range(size)]
    requests = [_caches_of(subject, each) for each in rows]
    positions = Positions(rows)
    together = left_aligned(requests, positions)
    result: dict[str, Any] = {}
    for width in (1, 4):
        ids = mx.array([[7 * i + j + 11 for j in range(width)] for i in range(size)])
        times: list[float] = []
        for _ in range(repeats + 4):
            start = time.perf_counter()
            logits, _ = subject.target.forward_batch(ids, together)
            mx.eval(mx.argmax(logits, axis=-1), cache_arrays(together))
            times.append(time.perf_counter() - start)
            positions.advance([width] * size)
        result[f"ms_{width}"] = round(statistics.median(times[4:]) * 1e3, 2)
    result["plain_tok_s"] = round(size / result["ms_1"] * 1e3, 1)
    return result


def _batch_identity(subject: ShapeModel) -> str:
    measured = Subject(
        subject.target,
        lambda: with_tapes(subject.model.make_cache()),
        vocabulary=4000,
        context_length=200,
        clock=time.perf_counter,
    )
    return result_of(batch_identity(measured, 3))


def _same_bits(subject: ShapeModel, context: int) -> dict[str, bool]:
    """Compares the logits of a verify of 4 rows and of the next step with single steps."""
    block, single, ids = (
        _caches_of(subject, context),
        _caches_of(subject, context),
        mx.arange(5) + 11,
    )
    forward = subject.target.forward
    actual = [
        forward(ids[:4], block, want="all").logits,
        forward(ids[4:], block, want="all").logits,
    ]
    each = [forward(ids[i : i + 1], single, want="all").logits for i in range(5)]
    expected = mx.concatenate(each)
    same = [mx.array_equal(actual[0], expected[:4]), mx.array_equal(actual[1], expected[4:])]
    return {"verify": bool(same[0].item()), "step_behind": bool(same[1].item())}


def _generate_step(subject: ShapeModel, prompt: int, tokens: int = 60) -> float:
    """Tokens a second of mlx-lm's own loop, without its first 10."""
    start = 0.0
    for count, _ in enumerate(
        generate_step(mx.arange(prompt), subject.model, max_tokens=tokens + 11)
    ):
        if count == 10:
            start = time.perf_counter()
        if count == tokens + 10:
            break
    return round(tokens / (time.perf_counter() - start), 1)


def _ratios(mlx: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    stock = mlx["generate_step_tok_s"]
    ratios = {
        "plain": ours["plain_tok_s"] / mlx["plain_tok_s"],
        "plain_to_generate_step": ours["plain_tok_s"] / stock,
        "ttft": ours["ttft_off_s"] / mlx["ttft_off_s"],
    }
    for key in (key for key in ours if key.startswith("K=")):
        ratios[f"{key}_to_plain_mlx"] = ours[key]["tok_s"] / mlx["plain_tok_s"]
    return {key: round(each, 3) for key, each in ratios.items()}


if __name__ == "__main__":
    main()
