"""Who is the clock of a plain step on a GPU: the host that builds it, or the device.

    python bench/gpu_step.py 27B:4 [35B-A3B:4 ...] [--steps 60] [--prompt 512]

Of a step of one row, with random weights: building its graph, handing it to the device, and the
whole of it while the step before it is still computed. Where the whole takes longer than the
host's two parts, the device is the clock.
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
    """Each is handed over before the one in front of it is read, as plain decoding does."""
    caches = with_tapes(subject.model.make_cache())
    block = subject.target.forward(as_row(list(range(2, 258))), caches, want="last")
    mx.eval(block.logits)
    token = mx.array([[7]], dtype=mx.int32)
    before: mx.array | None = None
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(steps + WARM_UP):
        begun = time.perf_counter()
        logits, _hidden = subject.target.forward_batch(token, caches)
        token = mx.argmax(logits[:, -1], axis=-1)[:, None].astype(mx.int32)
        built = time.perf_counter()
        mx.async_eval(token)
        handed_over = time.perf_counter()
        if before is not None:
            mx.eval(before)
        before, ended = token, time.perf_counter()
        for into, seconds in zip(
            times, (built - begun, handed_over - built, ended - begun), strict=True
        ):
            into.append(1e3 * seconds)
    return Step(*(round(statistics.median(each[WARM_UP:]), 2) for each in times))


if __name__ == "__main__":
    main()
