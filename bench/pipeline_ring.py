"""One rank of mlx-lm's ring pipeline, as `mlx.launch` starts it; answers `bench/pipeline.py`.

    mlx.launch -n 2 --backend ring bench/pipeline_ring.py -- FOLDER DTYPE PORT

Reads requests, a JSON object a line, from the bench's socket at 127.0.0.1:PORT and runs each with
mlx-lm's own `generate_step`; rank 0 answers.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def main() -> None:
    # Like runners: Linux may share the cores by session, and two processes would get one's share.
    os.setsid()
    folder, dtype, port = sys.argv[-3:]
    group = mx.distributed.init()
    model = _load(Path(folder), DTYPES[dtype], group)
    with (
        socket.create_connection(("127.0.0.1", int(port))) as control,
        control.makefile("rw") as lines,
    ):
        _send(lines, {"rank": group.rank(), "size": group.size(), "pid": os.getpid()})
        for line in lines:
            answer = _answer(model, json.loads(line))
            if group.rank() == 0:
                _send(lines, answer)


def _load(folder: Path, dtype: mx.Dtype, group: mx.distributed.Group) -> Any:
    """Loads like `mlx_lm.utils.sharded_load`, which only supports `model.model`."""
    loaded, _ = load_model(folder, lazy=True)
    model: Any = loaded
    model.set_dtype(dtype)
    if group.size() > 1:
        inner = getattr(model, "language_model", model)
        inner.model.pipeline(group)
    mx.eval(model.parameters())
    mx.eval(mx.distributed.all_sum(mx.array(1.0), stream=mx.cpu))
    return model


def _answer(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Greedy ids, and the seconds to the first of them and from there to the last."""
    start = time.perf_counter()
    first = last = 0.0
    ids: list[int] = []
    for token, _ in generate_step(
        prompt=mx.array(request["prompt"]),
        model=model,
        max_tokens=request["tokens"],
        prefill_step_size=request["chunk"],
    ):
        last = time.perf_counter()
        first = first or last
        ids.append(cast(int, token))
    return {"ids": ids, "first_s": first - start, "rest_s": last - first}


def _send(lines: Any, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


if __name__ == "__main__":
    main()
