"""Mixed load on a real node with a tiny model: does memory stay flat, and does nobody wait long?

    python bench/mixed_load.py [--requests 100000] [--seconds 3600] [--clients 12]

Clients in a closed loop ask one of a few systems with questions of their own: streamed or whole,
greedy or sampled, with drafts or without, of up to 16 tokens; every tenth goes away after its first
event. Every tenth of the way it prints what was answered, the longest that a request waited for its
first event, and what is held: the node's and the runner's resident bytes, and the caches that the
runner tells of. Ends with status 1 where an answer failed, where a cache is left when all are gone,
or where the resident bytes grew by more than a tenth from the middle to the end.
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
class Tally:
    """What the clients saw; each adds under the lock."""

    most: int
    until: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked: int = 0
    statuses: Counter[str] = field(default_factory=Counter[str])
    longest_s: float = 0.0
    """That a request waited for its first event, since it was last told."""

    def next(self) -> int | None:
        with self.lock:
            if self.asked >= self.most or time.monotonic() > self.until:
                return None
            self.asked += 1
            return self.asked

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
    begun = time.monotonic()
    tally = Tally(requests, begun + seconds)
    threads = [
        threading.Thread(target=client, args=(running, tally), daemon=True) for _ in range(clients)
    ]
    for thread in threads:
        thread.start()
    print(HEAD + "\n" + "|---" * HEAD.count(" | ") + "|---|", flush=True)
    resident = list[int]()
    while any(thread.is_alive() for thread in threads):
        if (status := running.process.poll()) is not None:
            seconds = time.monotonic() - begun
            print(
                f"the node ended with status {status} after {tally.asked} requests, {seconds:.0f} s"
            )
            print(*running.log.read_text().splitlines()[-20:], sep="\n")
            return 1
        share = max(tally.asked / requests, (time.monotonic() - begun) / seconds)
        if share >= (len(resident) + 1) / 10:
            resident.append(tell(running, tally, time.monotonic() - begun))
        time.sleep(0.2)
    eventually(lambda: stage_of(running)["cache_bytes"] == 0, 60)
    resident.append(tell(running, tally, time.monotonic() - begun))
    grown = resident[-1] / resident[len(resident) // 2] - 1
    failed = {k: n for k, n in tally.statuses.items() if k not in ("200", "gone")}
    print(f"{tally.asked} requests; failed: {failed or 'none'}; resident bytes grew by {grown:.1%}")
    return 1 if failed or grown > 0.1 else 0


def client(running: Node, tally: Tally) -> None:
    while (number := tally.next()) is not None:
        body = body_of(number)
        begun = time.monotonic()
        with closing(running.connect(running.port, 300)) as connection:
            try:
                status, waited_s = ask(connection, body, leaves=number % 10 == 0)
            except (OSError, http.client.HTTPException) as fault:
                status, waited_s = type(fault).__name__, time.monotonic() - begun
        tally.note(status, waited_s)


def ask(connection: Any, body: dict[str, Any], *, leaves: bool) -> tuple[str, float]:
    """The status, and the seconds until the first event or the answer."""
    begun = time.monotonic()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200 or not body["stream"]:
        said = response.read()
        if response.status != 200:
            print(response.status, said.decode(errors="replace")[:300], file=sys.stderr)
        return str(response.status), time.monotonic() - begun
    _ = response.readline()
    waited_s = time.monotonic() - begun
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


def tell(running: Node, tally: Tally, seconds: float) -> int:
    """Prints a line; the resident bytes of node and runner."""
    stage = stage_of(running)
    own, runner = (
        psutil.Process(pid).memory_info().rss for pid in (running.process.pid, stage["pid"])
    )
    answered, gone = tally.statuses["200"], tally.statuses["gone"]
    longest, tally.longest_s = tally.longest_s, 0.0
    counts = (round(seconds), answered, gone, f"{longest:.2f}", own, runner)
    held = (stage["cache_bytes"], stage["prefix_cache_bytes"])
    print("| " + " | ".join(str(each) for each in (*counts, *held)) + " |", flush=True)
    return own + runner


def stage_of(running: Node) -> Any:
    [stage] = running.stages()
    return stage


if __name__ == "__main__":
    sys.exit(main())
