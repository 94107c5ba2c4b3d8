"""Finds whether the host or the device bounds a plain step on a GPU.

    python bench/gpu_step.py 27B:4 [35B-A3B:4 ...] [--steps 60] [--prompt 512]

Times a step of one row with random weights: building its graph, issuing it to the device, and the
whole step while the one before it is still computed. If the whole takes longer than the host's two
parts, the device is the bound.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from shapes import Subject

from exo_node.mtp.rollback import with_tapes
from exo_node.mtp.seams import as_row

WARM_UP = 5


@dataclass(frozen=True, slots=True)
class Step:
    """Medians in milliseconds."""

    build_ms: float
    hand_over_ms: float
    whole_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description="The host's and the device's part of a plain step")
    _ = parser.add_argument("shapes", nargs="+", help="NAME:BITS, 16 for bfloat16")
    _ = parser.add_argument("--steps", type=int, default=60)
    _ = parser.add_argument("--prompt", type=int, default=512)
    options = parser.parse_args()
    print(f"{mx.default_device()}, {mx.device_info().get('device_name', '')}", flush=True)
    for spec in options.shapes:
        name, _, bits = spec.partition(":")
        subject = Subject(name, int(bits or 16), 20, options.prompt)
        _ = subject.choose("auto")
        print(json.dumps({"shape": spec} | measured(subject, options.steps)), flush=True)
        del subject
        mx.clear_cache()


def measured(subject: Subject, steps: int) -> dict[str, Any]:
    """The steps of one model, and the bytes of weights that each of them reads."""
    parameters = tree_flatten(subject.model.parameters())
    weights = sum(cast("mx.array", value).nbytes for _, value in parameters)
    return {"weights_GB": round(weights / 1e9, 2)} | asdict(_steps(subject, steps))


def _steps(subject: Subject, steps: int) -> Step:
    """Times steps; each is issued before the one before it is read, as in plain decoding."""
    caches = with_tapes(subject.model.make_cache())
    block = subject.target.forward(as_row(list(range(2, 258))), caches, want="last")
    mx.eval(block.logits)
    token = mx.array([[7]], dtype=mx.int32)
    before: mx.array | None = None
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(steps + WARM_UP):
        start = time.perf_counter()
        logits, _hidden = subject.target.forward_batch(token, caches)
        token = mx.argmax(logits[:, -1], axis=-1)[:, None].astype(mx.int32)
        built = time.perf_counter()
        mx.async_eval(token)
        issued = time.perf_counter()
        if before is not None:
            mx.eval(before)
        before, ended = token, time.perf_counter()
        for into, seconds in zip(
            times, (built - start, issued - built, ended - start), strict=True
        ):
            into.append(1e3 * seconds)
    return Step(*(round(statistics.median(each[WARM_UP:]), 2) for each in times))


if __name__ == "__main__":
    main()
