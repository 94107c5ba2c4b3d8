"""A hundred clients at once at a real node with the demo model.

    python bench/clients_at_once.py [--clients 100] [--stalled 8] [--tokens 40]

Each client is served, or refused at once with 429 and Retry-After; any other error is a fault.
Then clients that never read hold streams open; their cost is the time of another client's answer
relative to one before. Ends with status 1 if there is a fault.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))

from many_clients import Outcome, ask, at_once, never_reads, wrong
from nodes import Node, chat_body, node

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
ALONE = 9


def flood(running: Node, clients: int, tokens: int) -> list[str]:
    bodies = [
        chat_body(f"Tell me a story about the number {n}.", max_tokens=tokens, stream=n % 2 == 0)
        for n in range(clients)
    ]
    outcomes = at_once([partial(ask, running.port, CHAT, body, JSON) for body in bodies])
    statuses = Counter(each.status for each in outcomes)
    print(f"{clients} clients: {dict(statuses)}")
    for status in (200, 429):
        seconds = [each.seconds for each in outcomes if each.status == status]
        if seconds:
            middle, last = statistics.median(seconds), max(seconds)
            print(f"  {status}: after {middle:.2f} s in the median, {last:.2f} s at most")
    return wrong(outcomes)


def stalled(running: Node, clients: int, tokens: int) -> list[str]:
    body = chat_body("Tell me a story.", max_tokens=tokens)
    before = [_one(running, body) for _ in range(ALONE)]
    long = chat_body("Count.", max_tokens=3000, logprobs=True, top_logprobs=20)
    connections = [never_reads(running.port, CHAT, long) for _ in range(clients)]
    try:
        _until_quiet(running)
        after = [_one(running, body) for _ in range(ALONE)]
    finally:
        for connection in connections:
            connection.close()
    ratio = statistics.median(o.seconds for o in after) / statistics.median(
        o.seconds for o in before
    )
    print(f"{clients} clients that never read: an answer takes {ratio:.2f} times as long")
    return wrong([*before, *after])


def _one(running: Node, body: dict[str, Any]) -> Outcome:
    return ask(running.port, CHAT, body, JSON)


def _until_quiet(running: Node) -> None:
    """Waits until the answers without readers stop growing."""
    size = -1
    while (now := sum(int(stage["cache_bytes"]) for stage in running.stages())) != size:
        size = now
        time.sleep(2.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    _ = parser.add_argument("--clients", type=int, default=100)
    _ = parser.add_argument("--stalled", type=int, default=8)
    _ = parser.add_argument("--tokens", type=int, default=40)
    options = parser.parse_args()
    tokens = cast(int, options.tokens)
    with tempfile.TemporaryDirectory() as folder, node(Path(folder) / "n", "--no-mdns") as running:
        _ = running.chat("Hello.", max_tokens=2)
        faults = flood(running, cast(int, options.clients), tokens)
        faults += stalled(running, cast(int, options.stalled), tokens)
        log = running.log.read_text()
    faults += ["a traceback in the log"] if "Traceback" in log else []
    for each, times in Counter(faults).items():
        print(f"{times} times: {each}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
