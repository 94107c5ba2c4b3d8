"""Fresh nodes started at once in network namespaces, found by mDNS: always one cluster?

    python bench/joining.py [--runs 50] [--nodes 3] [--key] [--answer]
    python bench/joining.py --capture 100

The second form attacks instead, over real sockets of one process (`bench/captures.py`): a
cluster that approves everything, discovered or connecting by itself, with and without the owner's
cluster; and a man in the middle that relays or guesses. It needs no root, and ends with status 1 if
a node was captured, or a screen did not report that the digits did not match.

Needs root, for the namespaces of `tests/lab/namespaces.py`. In each run every node starts with
an empty data folder; a "person" reads the digits of all nodes but the first and types them there,
each as soon as it shows them. A run succeeds if every node sees all others alive in one
cluster under one head within a minute. It ends with a table of the times and the worst one, and
with status 1 if a run failed.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).resolve().parents[1] / "tests")
sys.path.insert(0, TESTS)
sys.path.insert(0, str(Path(TESTS) / "lab"))

from captures import Outcome, impostor_cluster, middle  # noqa: E402
from namespaces import network, why_not  # noqa: E402
from nodes import Node  # noqa: E402

WITHIN_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Joining, many times, in network namespaces.")
    _ = parser.add_argument("--runs", type=int, default=50)
    _ = parser.add_argument("--nodes", type=int, default=3)
    _ = parser.add_argument("--key", action="store_true", help="one key instead of approvals")
    _ = parser.add_argument("--answer", action="store_true", help="each cluster answers once")
    _ = parser.add_argument("--capture", type=int, help="attack as often instead")
    options = parser.parse_args()
    if options.capture:
        return attacks(options.capture)
    if (reason := why_not()) is not None:
        print(reason, file=sys.stderr)
        return 1
    times: list[float] = []
    for run in range(1, options.runs + 1):
        took = one_run(options.nodes, with_key=options.key, answers=options.answer)
        outcome = "NOT ONE CLUSTER" if took is None else f"one cluster after {took:.1f} s"
        print(f"run {run}: {outcome}", flush=True)
        times += [] if took is None else [took]
    print(f"{len(times)} of {options.runs} runs became one cluster of {options.nodes}")
    if times:
        middle = statistics.median(times)
        print(f"after the last was ready: median {middle:.1f} s, longest {max(times):.1f} s")
    return 0 if len(times) == options.runs else 1


def attacks(count: int) -> int:
    """Runs `count` attacks of each kind; the exit status."""
    kinds: dict[str, Callable[[], Coroutine[Any, Any, Outcome]]] = {
        f"impostor, {'mDNS' if mdns else 'no mDNS'}, owner {'there' if owner else 'away'}": partial(
            impostor_cluster, mdns=mdns, with_owner=owner
        )
        for mdns in (True, False)
        for owner in (True, False)
    }
    kinds |= {
        f"in the middle, {'relays' if relays else 'guesses'}": partial(middle, relays=relays)
        for relays in (True, False)
    }
    fine = True
    for name, attack in kinds.items():
        outcomes = asyncio.run(several(attack, count))
        captured = sum(outcome.captured for outcome in outcomes)
        reports = sum(outcome.both_told for outcome in outcomes)
        joined = sum(outcome.owner_joined is not False for outcome in outcomes)
        print(
            f"{name}: {captured} of {count} captured; both screens said so {reports}; "
            f"the owner got its node {joined}",
            flush=True,
        )
        fine = fine and captured == 0 and reports == joined == count
    return 0 if fine else 1


async def several(attack: Callable[[], Coroutine[Any, Any, Outcome]], count: int) -> list[Outcome]:
    """Runs ten attacks at a time: they mostly wait."""
    outcomes: list[Outcome] = []
    while len(outcomes) < count:
        batch = min(10, count - len(outcomes))
        outcomes += await asyncio.gather(*(attack() for _ in range(batch)))
    return outcomes


def one_run(count: int, *, with_key: bool, answers: bool) -> float | None:
    """Seconds from the last node's readiness to one cluster; None if there was none."""
    names = [chr(ord("a") + index) for index in range(count)]
    env = {"EXO_CLUSTER_KEY": "a" * 32} if with_key else None
    with tempfile.TemporaryDirectory() as root, network(*names) as net, ExitStack() as stack:
        contexts = [net.node(name, Path(root, name), env=env) for name in names]
        nodes = start_together(stack, contexts)
        ready = time.monotonic()
        while time.monotonic() - ready < WITHIN_S:
            if not with_key:
                type_all(nodes)
            if is_one(nodes):
                took = time.monotonic() - ready
                if answers:
                    _ = nodes[-1].chat("Who are you?", max_tokens=8)
                return took
            time.sleep(0.1)
        for node in nodes:
            print(f"--- {node.data_dir.name}\n{node.log.read_text()}", file=sys.stderr)
        return None


def start_together(
    stack: ExitStack, contexts: Sequence[AbstractContextManager[Node]]
) -> list[Node]:
    """Starts all processes before it waits for the first one."""
    with ThreadPoolExecutor(len(contexts)) as pool:
        return list(pool.map(stack.enter_context, contexts))


def ask(node: Node, path: str) -> Any:
    """The answer's body; empty while the node restarts."""
    try:
        return node.call("GET", path, timeout_s=5).body
    except OSError:
        return {}


def type_all(nodes: Sequence[Node]) -> None:
    """Types the digits of every node that waits for the first one there."""
    founder, *others = nodes
    waiting = {r["node"]: r["id"] for r in ask(founder, "/v1/join/requests").get("data", [])}
    for node in others:
        digits = ask(node, "/v1/join/requests").get("digits")
        id_ = waiting.get(ask(node, "/v1/cluster").get("self"))
        if digits is None or id_ is None:
            continue
        try:
            path = f"/v1/join/requests/{id_}/approve"
            _ = founder.call("POST", path, {"code": digits}, timeout_s=15)
        except OSError:
            continue


def is_one(nodes: Sequence[Node]) -> bool:
    views = [ask(node, "/v1/cluster") for node in nodes]
    alive = [[n["status"] for n in view.get("nodes", [])].count("alive") for view in views]
    fingerprints = {view.get("cluster") for view in views}
    heads = {view.get("head") for view in views}
    return set(alive) == {len(nodes)} and len(fingerprints) == len(heads) == 1 and None not in heads


if __name__ == "__main__":
    sys.exit(main())
