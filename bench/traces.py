"""Random traces against cold engines: do other requests change an answer?

    python bench/traces.py [--traces 1000] [--seconds 3600] [--seed 0] [--room 600000]

A trace is a few rounds of up to five concurrent conversations with a common prefix, greedy or
sampled, with K of 0 to 3; some are cancelled, and the prefix cache has room for a few of them only.
Every answer is compared with that of a new engine without drafts, which is stored for traces with
the same request. On a tiny random model in float32. It stops at the first difference, at the count
or at the time, and prints counts and memory ten times in all.
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
from batch_traces import Totals, follow, warm_engine

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
    warm, total, start = warm_engine(options.room), Totals(), time.monotonic()
    every = max(1, options.traces // 10)
    print(HEAD + "\n" + "|---" * HEAD.count(" | ") + "|---|", flush=True)
    trace_count = 0
    while trace_count < options.traces and time.monotonic() - start < options.seconds:
        total += follow(warm, options.seed + trace_count, options.room)
        trace_count += 1
        if trace_count % every == 0:
            print_line(trace_count, total, warm.prefix_cache_bytes)
    if trace_count % every:
        print_line(trace_count, total, warm.prefix_cache_bytes)
    print(f"no difference in {trace_count} traces, {time.monotonic() - start:.0f} s")


def print_line(trace_count: int, total: Totals, prefixes: int) -> None:
    mx.clear_cache()
    resident = psutil.Process().memory_info().rss
    counts = (
        trace_count,
        total.answers,
        total.cancelled,
        total.tokens,
        total.cached,
        total.batched,
    )
    memory = (prefixes, mx.get_active_memory(), resident)
    print("| " + " | ".join(str(each) for each in (*counts, *memory)) + " |", flush=True)


if __name__ == "__main__":
    main()
