"""Mixed load on a real node with a tiny model: does memory stay flat, and are waits short?

    python bench/mixed_load.py [--requests 100000] [--seconds 3600] [--clients 12]

Clients in a closed loop send questions after one of a few system prompts: streamed or whole,
greedy or sampled, with drafts or without, of up to 16 tokens; every tenth disconnects after its
first event. Ten times in all it prints the number of answers, the longest wait for a first event,
and memory: the node's and the runner's resident bytes, and the caches that the runner reports. Ends
with status 1 if an answer failed, if a cache remains at the end, or if the resident bytes grew by
more than a tenth from the middle to the end.
"""

import argparse
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import psutil
from models import make_checkpoint
from nodes import Node, eventually, node

HEAD = "| seconds | answered | gone | longest wait, s | node | runner | caches | prefixes |"
MODEL = "tiny"


@dataclass(slots=True)
class LoadTally:
    """Counts of the clients' results, guarded by a lock."""

    most: int
    until: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: int = 0
    statuses: Counter[str] = field(default_factory=Counter[str])
    longest_s: float = 0.0
    """The longest wait for a first event since the last line."""

    def next(self) -> int | None:
        with self.lock:
            if self.requests >= self.most or time.monotonic() > self.until:
                return None
            self.requests += 1
            return self.requests

    def note(self, status: str, waited_s: float) -> None:
        with self.lock:
            self.statuses[status] += 1
            self.longest_s = max(self.longest_s, waited_s)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed load on a tiny model")
    _ = parser.add_argument("--requests", type=int, default=100_000)
    _ = parser.add_argument("--seconds", type=float, default=3600.0)
    _ = parser.add_argument("--clients", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        _ = make_checkpoint(
            root / "models" / MODEL, "qwen3_5", dtype="float32", layers=4, vocab=4096
        )
        flags = ("--no-mdns", "--models-dir", str(root / "models"))
        with node(root / "node", *flags, env={"EXO_OFFLINE": "1"}) as running:
            return load(running, options.requests, options.seconds, options.clients)


def load(running: Node, requests: int, seconds: float, clients: int) -> int:
    reply = running.call("POST", "/v1/chat/completions", body_of(0) | {"stream": False})
    assert reply.status == 200, reply
    start = time.monotonic()
    tally = LoadTally(requests, start + seconds)
    threads = [
        threading.Thread(target=client, args=(running, tally), daemon=True) for _ in range(clients)
    ]
    for thread in threads:
        thread.start()
    print(HEAD + "\n" + "|---" * HEAD.count(" | ") + "|---|", flush=True)
    resident = list[int]()
    while any(thread.is_alive() for thread in threads):
        if (status := running.process.poll()) is not None:
            seconds = time.monotonic() - start
            print(
                f"the node ended with status {status} after {tally.requests} requests, "
                f"{seconds:.0f} s"
            )
            print(*running.log.read_text().splitlines()[-20:], sep="\n")
            return 1
        share = max(tally.requests / requests, (time.monotonic() - start) / seconds)
        if share >= (len(resident) + 1) / 10:
            resident.append(print_line(running, tally, time.monotonic() - start))
        time.sleep(0.2)
    eventually(lambda: stage_of(running)["cache_bytes"] == 0, 60)
    resident.append(print_line(running, tally, time.monotonic() - start))
    growth = resident[-1] / resident[len(resident) // 2] - 1
    failed = {k: n for k, n in tally.statuses.items() if k not in ("200", "gone")}
    print(
        f"{tally.requests} requests; failed: {failed or 'none'}; "
        f"resident bytes grew by {growth:.1%}"
    )
    return 1 if failed or growth > 0.1 else 0


def client(running: Node, tally: LoadTally) -> None:
    while (number := tally.next()) is not None:
        body = body_of(number)
        start = time.monotonic()
        with closing(running.connect(running.port, 300)) as connection:
            try:
                status, waited_s = ask(connection, body, leaves=number % 10 == 0)
            except (OSError, http.client.HTTPException) as fault:
                status, waited_s = type(fault).__name__, time.monotonic() - start
        tally.note(status, waited_s)


def ask(connection: Any, body: dict[str, Any], *, leaves: bool) -> tuple[str, float]:
    """The status, and the seconds until the first event or the answer."""
    start = time.monotonic()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200 or not body["stream"]:
        text = response.read()
        if response.status != 200:
            print(response.status, text.decode(errors="replace")[:300], file=sys.stderr)
        return str(response.status), time.monotonic() - start
    _ = response.readline()
    waited_s = time.monotonic() - start
    if leaves:
        return "gone", waited_s
    ended = response.read().rstrip().endswith(b"data: [DONE]")
    return "200" if ended else "broke off", waited_s


def body_of(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    system = " ".join(["Answer in the words of a book."] * draw.choice([0, 4, 40]))
    question = f"What is {draw.choice('abcdef')} of number {draw.randrange(40)}?"
    messages = [{"role": "system", "content": system}] if system else []
    return {
        "model": MODEL,
        "messages": [*messages, {"role": "user", "content": question}],
        "max_tokens": draw.randrange(1, 17),
        "temperature": draw.choice([0, 0, 0.8]),
        "num_draft_tokens": draw.choice([0, 0, 1]),
        "stream": draw.random() < 0.6 or number % 10 == 0,
    }


def print_line(running: Node, tally: LoadTally, seconds: float) -> int:
    """Prints a line; returns the resident bytes of node and runner."""
    stage = stage_of(running)
    own, runner = (
        psutil.Process(pid).memory_info().rss for pid in (running.process.pid, stage["pid"])
    )
    answered, disconnected = tally.statuses["200"], tally.statuses["gone"]
    longest, tally.longest_s = tally.longest_s, 0.0
    counts = (round(seconds), answered, disconnected, f"{longest:.2f}", own, runner)
    cache_bytes = (stage["cache_bytes"], stage["prefix_cache_bytes"])
    print("| " + " | ".join(str(each) for each in (*counts, *cache_bytes)) + " |", flush=True)
    return own + runner


def stage_of(running: Node) -> Any:
    [stage] = running.stages()
    return stage


if __name__ == "__main__":
    sys.exit(main())
