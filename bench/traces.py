"""Random traces against cold engines: is an answer the same whoever was beside and before it?

    python bench/traces.py [--traces 1000] [--seconds 3600] [--seed 0] [--room 600000]

A trace is a few rounds of up to five conversations at once that begin alike, greedy or sampled,
with K of 0 to 3; some are cancelled, and the prefix cache has room for a few of them only. Every
answer is compared with that of an engine which never did anything else, without drafts; what such
engines answered is kept for traces that ask the same. On a tiny random model in float32. It stops
at the first difference, at the count or at the time, and prints every tenth of the way what was
done and what memory is held.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))

from exo_node.shard.model import loader_import  # before MLX, so that products of our own may be

# isort: split
import mlx.core as mx
import psutil
from batch_traces import Told, follow, warm_engine

from exo_node.shard.kernels.cpu_products import choose_products

LOADER = loader_import.__name__

HEAD = "| traces | answers | cancelled | tokens | cached | batched | prefixes | active | resident |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Random traces against cold engines")
    _ = parser.add_argument("--traces", type=int, default=1000)
    _ = parser.add_argument("--seconds", type=float, default=3600.0)
    _ = parser.add_argument("--seed", type=int, default=0)
    _ = parser.add_argument("--room", type=int, default=600_000, help="bytes of prefixes")
    options = parser.parse_args()
    print(f"products: {choose_products('auto', time.process_time)}")
    warm, told, begun = warm_engine(options.room), Told(), time.monotonic()
    every = max(1, options.traces // 10)
    print(HEAD + "\n" + "|---" * HEAD.count(" | ") + "|---|", flush=True)
    done = 0
    while done < options.traces and time.monotonic() - begun < options.seconds:
        told += follow(warm, options.seed + done, options.room)
        done += 1
        if done % every == 0:
            tell(done, told, warm.prefix_cache_bytes)
    if done % every:
        tell(done, told, warm.prefix_cache_bytes)
    print(f"no difference in {done} traces, {time.monotonic() - begun:.0f} s")


def tell(done: int, told: Told, prefixes: int) -> None:
    mx.clear_cache()
    resident = psutil.Process().memory_info().rss
    counts = (done, told.answers, told.cancelled, told.tokens, told.cached, told.batched)
    held = (prefixes, mx.get_active_memory(), resident)
    print("| " + " | ".join(str(each) for each in (*counts, *held)) + " |", flush=True)


if __name__ == "__main__":
    main()
