"""Seconds until the first token of a machine that never loaded the demo and compiled nothing.

    python bench/first_answer.py [--repeats 5] [--kill] [--compiled]

From `exo-node start` on; with `--kill` the longest pause of an answer whose node is killed, at a
spare node. `--compiled`: in this user's home, where earlier runs left what they compiled.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from nodes import CALL_S, Node, copy_key, eventually, grpc_address, node, sees

FLAGS = ("--no-mdns",)


def main() -> int:
    parser = argparse.ArgumentParser(description="The first answer of a new machine")
    _ = parser.add_argument("--repeats", type=int, default=5)
    _ = parser.add_argument("--kill", action="store_true", help="the pause at a spare node")
    _ = parser.add_argument("--compiled", action="store_true", help="use what was compiled before")
    options = parser.parse_args()
    seconds = list[float]()
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            env = {"EXO_MEASURE_AT_LOAD": "0"} | ({} if options.compiled else {"HOME": folder})
            trial = pause if options.kill else first_token
            seconds.append(trial(Path(folder), env))
        print(f"{seconds[-1]:.2f} s, load average {os.getloadavg()[0]:.1f}", flush=True)
    print(f"median {statistics.median(seconds):.2f} s, most {max(seconds):.2f} s")
    return 0


def first_token(folder: Path, env: dict[str, str]) -> float:
    """Seconds from the start of a node to the first token of an answer."""
    began_at = time.monotonic()
    with node(folder / "one", *FLAGS, env=env, measures=True) as one, tokens(one) as times:
        return next(times)[0] - began_at


def pause(folder: Path, env: dict[str, str]) -> float:
    """The longest pause of an answer at a spare node when the node that computes it is killed."""
    with node(folder / "spare", *FLAGS, env=env, measures=True) as spare:
        home = copy_key(spare, folder / "first")
        with node(home, *FLAGS, "--peer", grpc_address(spare), measures=True) as first:
            eventually(lambda: sees(spare, 2), CALL_S)
            _ = spare.call("POST", "/v1/placements", {"model": "demo", "nodes": ["first"]})
            eventually(lambda: bool(first.stages()), CALL_S)
            runner, at = first.stages()[0]["pid"], list[float]()
            with tokens(spare) as times:
                for seconds, count in times:
                    at.append(seconds)
                    if count > 5 and first.process.poll() is None:
                        first.process.kill()
                        os.kill(runner, signal.SIGKILL)
                        _ = first.process.wait()
            return max(later - earlier for earlier, later in pairwise(at))


@contextmanager
def tokens(asked: Node) -> "Generator[Iterator[tuple[float, int]]]":
    """The time of each event of an answer that has tokens, and how many it has by then."""

    def timed(events: Iterator[Any]) -> Iterator[tuple[float, int]]:
        count = 0
        for event in events:
            choices = () if event == "[DONE]" else event.get("choices", ())
            if new := sum(len(choice.get("token_ids") or ()) for choice in choices):
                count += new
                yield time.monotonic(), count

    with asked.stream("Tell me a story.", max_tokens=60, return_token_ids=True) as events:
        yield timed(events)


if __name__ == "__main__":
    sys.exit(main())
