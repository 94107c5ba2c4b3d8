"""Measures the costs of an idle cluster: CPU of each node, elections, head changes.

python bench/idle.py [--nodes 3] [--minutes 10] [--model demo]

Real nodes on loopback. --model loads one first, so that a runner idles as well.
"""

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import psutil
from nodes import Node, copy_key, eventually, grpc_address, node, sees

AIM_PERCENT = 2.0
SETTLE_S = 5.0
WITHIN_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description="What an idle cluster costs")
    _ = parser.add_argument("--nodes", type=int, default=3)
    _ = parser.add_argument("--minutes", type=float, default=10.0)
    _ = parser.add_argument("--model", help="place it before the measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        first = stack.enter_context(node(Path(scratch) / "n0", "--no-mdns"))
        flags = ("--no-mdns", "--peer", grpc_address(first))
        folders = (Path(scratch) / f"n{number}" for number in range(1, options.nodes))
        others = [stack.enter_context(node(copy_key(first, each), *flags)) for each in folders]
        nodes = [first, *others]
        eventually(lambda: all(sees(each, len(nodes)) for each in nodes), WITHIN_S)
        if options.model:
            reply = first.call("POST", "/v1/placements", {"model": options.model})
            assert reply.status == 200, reply
        time.sleep(SETTLE_S)
        status = _measure(nodes, 60 * options.minutes)
    raise SystemExit(status)


def _cluster(running: Node) -> Any:
    return running.call("GET", "/v1/cluster").body


def _cpu_s(running: Node) -> dict[str, float]:
    """Seconds of processor time so far, of the node and of its runners together."""
    process = psutil.Process(running.process.pid)
    runners = sum(sum(child.cpu_times()[:2]) for child in process.children())
    return {"node": sum(process.cpu_times()[:2]), "runners": runners}


def _measure(nodes: list[Node], seconds: float) -> int:
    """Prints a line for each node; returns 1 if one is above the aim or the head changed."""
    before, leases = list(map(_cpu_s, nodes)), list(map(_cluster, nodes))
    start = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - start
    after, now = list(map(_cpu_s, nodes)), list(map(_cluster, nodes))
    worst = 0.0
    for running, old, new, cluster in zip(nodes, before, after, now, strict=True):
        used = {name: 100 * (new[name] - old[name]) / took for name in new}
        worst = max(worst, used["node"])
        lease = cluster["lease"]
        print(
            f"{running.data_dir.name}: CPU {used['node']:.2f} %, runners {used['runners']:.2f} %; "
            f"term {cluster['term']}, elections {lease['elections']}, "
            f"head changes {lease['head_changes']}"
        )
    elections = sum(c["lease"]["elections"] for c in now)
    changed = [c["term"] for c in now] != [c["term"] for c in leases]
    print(f"{took / 60:.1f} minutes: {elections} elections since the start, ", end="")
    print("the head changed" if changed else "no head change", end="; ")
    print(f"highest CPU {worst:.2f} % (aim: under {AIM_PERCENT:g} %)")
    return int(changed or worst > AIM_PERCENT)


if __name__ == "__main__":
    main()
