"""Nodes on a slow, lossy and cut network: false deaths, heads after a heal, outdated attempts.

    python bench/network_faults.py steady [--minutes 10] [--round-trip-ms 200] [--loss 0.05]
    python bench/network_faults.py partitions [--cycles 20] [--seed 1] [--tokens 1500]

Three nodes in network namespaces of their own, the demo model over all three. `steady` counts the
nodes' events on a slow network that loses frames, and requests answers from time to time.
`partitions` cuts the network at random under long answers of every node, one way or both, and heals
it: the answers of both sides must end well. Needs Linux and root. Ends with status 1 if there was a
fault.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))

from listening import Answer, ask, events
from namespaces import Network, cluster, is_whole, network, why_not
from nodes import Node, eventually
from trials import NEVER_END, oracle_question
from witness import read, witnessed

NAMES = ("a", "b", "c")
STORY = oracle_question("Tell me a story.")
ENDS_WITHIN_S = 300.0
WHOLE_WITHIN_S = 60.0


@dataclass(slots=True)
class FaultTally:
    """Counts of events by name, and descriptions of faults."""

    counts: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])

    def ended(self, answer: Answer, expected: tuple[int, ...]) -> None:
        """Counts an answer, and notes a fault unless it is whole."""
        if not answer.ended(ENDS_WITHIN_S):
            self.counts["answers that hung"] += 1
            self.wrong.append(f"an answer had {len(answer.ids)} ids and no end")
        elif answer.error:
            self.counts[f"answers that ended by {answer.error.split(':')[0]}"] += 1
            self.wrong.append(f"an answer ended by {answer.error}")
        else:
            self.counts["answers that ended well"] += 1
            self.counts["resumes"] += int(answer.stats.get("resumes", 0))
        if tuple(answer.ids) != expected[: len(answer.ids)]:
            self.wrong.append(f"an answer's ids differ: {answer.ids}")

    def print(self) -> int:
        print("\n| what | times |\n|---|---|")
        for name, count in sorted(self.counts.items()):
            print(f"| {name} | {count} |")
        for sentence in self.wrong:
            print(f"wrong: {sentence}")
        print("as it should be" if not self.wrong else f"{len(self.wrong)} things were wrong")
        return 1 if self.wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Nodes on a bad network")
    commands = parser.add_subparsers(required=True)
    slow = commands.add_parser("steady")
    _ = slow.add_argument("--minutes", type=float, default=10.0)
    _ = slow.add_argument("--round-trip-ms", type=float, default=200.0)
    _ = slow.add_argument("--loss", type=float, default=0.05)
    slow.set_defaults(run=steady)
    broken = commands.add_parser("partitions")
    _ = broken.add_argument("--cycles", type=int, default=20)
    _ = broken.add_argument("--seed", type=int, default=1)
    _ = broken.add_argument("--tokens", type=int, default=1500, help="of each answer")
    broken.set_defaults(run=partitions)
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        print(reason)
        return 2
    with running() as (net, nodes, attempts):
        return int(options.run(options, net, nodes, attempts))


@contextmanager
def running() -> Generator[tuple[Network, dict[str, Node], Path]]:
    """The network, its nodes, and the folder in which their runners record attempts."""
    with tempfile.TemporaryDirectory() as scratch, network(*NAMES) as net:
        root = Path(scratch)
        attempts = root / "attempts"
        command = witnessed(root / "python", attempts)
        with cluster(net, root, NAMES, command=command) as nodes:
            eventually(lambda: is_whole(nodes), WHOLE_WITHIN_S)
            yield net, nodes, attempts


def place(nodes: Mapping[str, Node]) -> None:
    body = {"model": "demo", "min_nodes": 3, "max_nodes": 3}
    reply = nodes["a"].call("POST", "/v1/placements", body)
    assert reply.status == 200, reply
    eventually(lambda: is_ready(nodes["a"]), WHOLE_WITHIN_S)


def is_ready(door: Node) -> bool:
    placed = door.call("GET", "/v1/placements").body["data"]
    return bool(placed) and placed[0]["status"] == "ready"


def undisturbed(door: Node, tokens: int) -> tuple[int, ...]:
    answer = ask(door, STORY.prompt, max_tokens=tokens, **NEVER_END)
    assert answer.ended(ENDS_WITHIN_S) and not answer.error, answer.error
    return tuple(answer.ids)


def kinds(nodes: Mapping[str, Node]) -> Counter[str]:
    """Events of all nodes together, by kind."""
    return Counter(str(event["kind"]) for n in nodes.values() for event in events(n))


def texts(nodes: Mapping[str, Node], kind: str) -> list[str]:
    """The texts of events of one kind."""
    matches = (event for n in nodes.values() for event in events(n) if event["kind"] == kind)
    return [str(event["text"]) for event in matches]


def steady(options: Any, net: Network, nodes: dict[str, Node], attempts: Path) -> int:
    tally = FaultTally()
    place(nodes)
    before, counts = kinds(nodes), net.counts()
    _ = net.shape(delay_ms=options.round_trip_ms / 2, loss=options.loss)
    start = time.monotonic()
    while time.monotonic() - start < 60 * options.minutes:
        for running in nodes.values():
            answer = ask(running, STORY.prompt, max_tokens=16)
            tally.ended(answer, STORY.ids)
            time.sleep(5)
        minutes = (time.monotonic() - start) / 60
        print(f"{minutes:.1f} min: {dict(kinds(nodes) - before)}", flush=True)
    after = net.shape()
    new_events = kinds(nodes) - before
    tally.counts.update({f"event: {kind}": count for kind, count in new_events.items()})
    tally.counts["frames forwarded"] = after.forwarded - counts.forwarded
    tally.counts["frames lost"] = after.lost - counts.lost
    tally.counts["frames over the queue's length"] = after.overflowed - counts.overflowed
    for kind in ("died", "head_changed", "election", "stage_lost"):
        if new_events[kind]:
            event_texts = "; ".join(texts(nodes, kind)[-new_events[kind] :])
            tally.wrong.append(
                f"{kind} {new_events[kind]} times, and nothing had failed: {event_texts}"
            )
    return tally.print()


def partitions(options: Any, net: Network, nodes: dict[str, Node], attempts: Path) -> int:
    tally = FaultTally()
    chance = random.Random(options.seed)
    place(nodes)
    expected = undisturbed(nodes["a"], options.tokens)
    slowest = 0.0
    for cycle in range(options.cycles):
        parameters = {"max_tokens": options.tokens, **NEVER_END}
        answers = [ask(door, STORY.prompt, **parameters) for door in nodes.values()]
        at = chance.randrange(1, max(2, options.tokens // 4))
        for answer in answers:
            _ = answer.until(lambda a, at=at: len(a.ids) >= at, ENDS_WITHIN_S)
        cut = _cut(net, chance)
        time.sleep(chance.uniform(1, 12))
        _ = net.heal()
        healed = time.monotonic()
        try:
            eventually(lambda: is_whole(nodes), WHOLE_WITHIN_S)
        except AssertionError:
            tally.wrong.append(f"cycle {cycle}: not one cluster with one head after {cut}")
        took = time.monotonic() - healed
        slowest = max(slowest, took)
        for answer in answers:
            tally.ended(answer, expected)
        for running in nodes.values():
            after = ask(running, STORY.prompt)
            tally.ended(after, STORY.ids)
        tally.counts["partitions healed"] += 1
        print(f"cycle {cycle}: {cut}, whole {took:.1f} s after the heal", flush=True)
    record = read(attempts)
    tally.counts["forwards"] = record.forwards
    tally.counts["requests with several attempts on a runner"] = record.resumed
    tally.counts["forwards of an attempt after a newer one"] = record.went_back
    tally.counts["seconds until whole, at most"] = round(slowest)
    if record.went_back:
        tally.wrong.append("a stage ran an old attempt after a newer one")
    return tally.print()


def _cut(net: Network, chance: random.Random) -> str:
    """Cuts one node off from the others, both ways or one; returns a description."""
    lonely = chance.choice(NAMES)
    others = [name for name in NAMES if name != lonely]
    match chance.choice(("both ways", "hears nobody", "nobody hears it")):
        case "both ways" as how:
            _ = net.part([lonely], others)
        case "hears nobody" as how:
            for name in others:
                _ = net.block(name, lonely)
        case how:
            for name in others:
                _ = net.block(lonely, name)
    return f"{lonely} {how}"


if __name__ == "__main__":
    # Ended from outside, it still ends its nodes.
    _ = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
