"""Measures agents at two replicas of a model, each on a node with one core, against one node.

    python bench/replicas.py [--agents 16] [--turns 6] [--first 1000] [--added 200] [--tokens 64]
        [--repeats 1] [--cold 4] [--context 65536]
        [--probes 4] [--probe-first 2000] [--probe-added 80]

Each agent's first turn is a text of its own; its later ones follow as soon as it has its answer.
All agents ask the first node. Arms have nodes of their own, with empty data folders, and the same
texts within a repeat; another arm begins each time. The ids of every turn at two replicas are
compared with those of one node, and `--cold` turns of one node with `"cache": false`. Answers and
cached prompts of a node share the room for one full context (`--context`).

A later turn is answered where its prefix lies if it is read after all of the turn before but its
end (`UNCACHED_ROWS`), so a turn should have more tokens than that.

Then `--probes` conversations, each with nothing beside it, are continued by a second turn at the
idle cluster; as many others after the second node was stopped and has come back with its data
folder. Their time to the first token is given relative to the same request with
`"cache": false`. Linux. Ends with status 1 if ids differ.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import conversation_turns
from conversation_turns import MODEL, Message, TurnAnswer, ask, with_answer, words
from nodes import COMMAND, Node, copy_key, eventually, grpc_address, node, sees

from exo_node.mtp.schedule import LEAST_TURN
from exo_node_bench.spread import spread

WITHIN_S = 180.0
UNCACHED_ROWS = LEAST_TURN + 16
"""Rows at a prompt's end after which no next turn may begin: a turn that is too short to end a
forward, and the template's beginning of an answer."""
ANNOUNCED_WITHIN_S = 4.0
"""Time for files to be written, and for heartbeats that announce prefixes."""


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One request of an agent, and its answer."""

    messages: Sequence[Message]
    answer: TurnAnswer

    @property
    def node(self) -> str:
        """The id of the node that answered."""
        return self.answer.stats["placement"]["stages"][0]["node"]

    @property
    def tier(self) -> str:
        """The tier that had the cached part of its prompt."""
        return self.answer.stats["cached_tier"] or "nowhere"


Agent = list[AgentTurn]


def main() -> int:
    options = _options()
    differences, ratios = 0, list[float]()
    with tempfile.TemporaryDirectory() as scratch:
        flags = conversation_turns.long_model(Path(scratch) / "models", options.context)
        for repeat in range(options.repeats):
            rates, agents = dict[int, float](), dict[int, list[Agent]]()
            for replicas in (1, 2) if repeat % 2 == 0 else (2, 1):
                folder = Path(scratch) / f"{repeat}-{replicas}"
                with _cluster(folder, flags, replicas) as door:
                    rates[replicas], agents[replicas] = _load(door, options, f"{repeat}")
                    if replicas == 1:
                        differences += _cold_differences(door, agents[1], options)
            differences += _id_differences(agents[1], agents[2])
            ratios.append(rates[2] / rates[1])
        if options.repeats:
            print(f"tokens a second, two replicas over one: {spread(ratios):.2f}")
        if options.probes:
            differences += _probe(Path(scratch) / "probes", flags, options)
    print(f"turns with other ids: {differences}")
    return 1 if differences else 0


# --------------------------------------------------------------------------- nodes


@contextmanager
def _cluster(folder: Path, flags: Sequence[str], replicas: int) -> Generator[Node]:
    """The first of `replicas` nodes, each with a core and a loaded model of its own."""
    with _pinned(folder / "one", 0, *flags) as one:
        if replicas == 1:
            _place(one, 1)
            yield one
            return
        with _pinned(copy_key(one, folder / "two"), 1, *flags, "--peer", grpc_address(one)):
            eventually(lambda: sees(one, 2), WITHIN_S)
            _place(one, 2)
            yield one


@contextmanager
def _pinned(data_dir: Path, core: int, *flags: str) -> Generator[Node]:
    """A node whose processes have one core."""
    command = ("taskset", "--cpu-list", str(core), COMMAND)
    with node(data_dir, "--no-mdns", *flags, command=command) as running:
        yield running


def _place(door: Node, replicas: int) -> None:
    reply = door.call("POST", "/v1/placements", {"model": MODEL, "replicas": replicas})
    assert reply.status == 200, reply
    _await_replicas(door, replicas)
    # Each answers once, so that none compiles or loads a file for the first time under load.
    with ThreadPoolExecutor(replicas) as pool:
        hello: list[Message] = [{"role": "user", "content": "Tell me a story."}]
        first = [pool.submit(ask, door, hello, 32, cache=False) for _ in range(replicas)]
        _ = [each.result() for each in first]


def _await_replicas(door: Node, count: int) -> None:
    def ready() -> int:
        placements = door.call("GET", "/v1/placements").body["data"]
        return sum(placement["status"] == "ready" for placement in placements)

    eventually(lambda: ready() == count, WITHIN_S)


# --------------------------------------------------------------------------- agents


def _load(door: Node, options: argparse.Namespace, seed: str) -> tuple[float, list[Agent]]:
    """Tokens a second of all agents, and their turns."""
    began_at, cpu_s = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(options.agents) as pool:
        names = [f"{seed}/{number}" for number in range(options.agents)]
        agents = [*pool.map(partial(_agent, door, options), names)]
    seconds = time.perf_counter() - began_at
    turns = [turn for agent in agents for turn in agent]
    rate = sum(turn.answer.completion_tokens for turn in turns) / seconds
    later = [turn.answer.ttft_s for agent in agents for turn in agent[1:]]
    nodes = Counter(turn.node for turn in turns)
    tiers = Counter(turn.tier for agent in agents for turn in agent[1:])
    in_place, moved = in_place_share(agents), moved_share(agents)
    print(
        f"{len(nodes)} node(s), repeat {seed}: {rate:.1f} tokens a second, {seconds:.0f} s, "
        f"turns {sorted(nodes.values())}; prompts of {_lengths(agents)} tokens\n"
        f"  later turns where their prefix lies: {in_place:.1%}; at another node than the turn "
        f"before: {moved:.1%}; cached of their tokens: {_cached_share(agents):.1%}, "
        f"in {dict(tiers)}\n"
        f"  first token, median: first turns {_first_turns_s(agents):.2f} s, "
        f"later {statistics.median(later):.2f} s; "
        f"client: {(time.process_time() - cpu_s) / seconds:.1%} of a core",
        flush=True,
    )
    return rate, agents


def _agent(door: Node, options: argparse.Namespace, name: str) -> Agent:
    messages: list[Message] = [{"role": "user", "content": words(options.first, name)}]
    turns = list[AgentTurn]()
    for number in range(options.turns):
        turns.append(AgentTurn(messages, ask(door, messages, options.tokens)))
        added = words(options.added, f"{name}/{number}")
        messages = with_answer(messages, turns[-1].answer.text, added)
    return turns


def in_place_share(agents: Sequence[Agent]) -> float:
    """The share of later turns that were read after the turn before."""
    return statistics.mean(
        is_behind(before.answer, turn.answer)
        for agent in agents
        for before, turn in pairwise(agent)
    )


def is_behind(before: TurnAnswer, answer: TurnAnswer) -> bool:
    """Whether a turn was read after the prompt of the turn before, but for its end."""
    return answer.cached_tokens >= before.prompt_tokens - UNCACHED_ROWS


def moved_share(agents: Sequence[Agent]) -> float:
    """The share of later turns that were answered by another node than the turn before."""
    return statistics.mean(
        before.node != turn.node for agent in agents for before, turn in pairwise(agent)
    )


def _cached_share(agents: Sequence[Agent]) -> float:
    later = [turn.answer for agent in agents for turn in agent[1:]]
    return sum(each.cached_tokens for each in later) / sum(each.prompt_tokens for each in later)


def _lengths(agents: Sequence[Agent]) -> str:
    lengths = [turn.answer.prompt_tokens for agent in agents for turn in agent]
    return f"{min(lengths)} to {max(lengths)}"


def _first_turns_s(agents: Sequence[Agent]) -> float:
    return statistics.median(agent[0].answer.ttft_s for agent in agents)


# --------------------------------------------------------------------------- ids


def _id_differences(expected: Sequence[Agent], agents: Sequence[Agent]) -> int:
    """Turns whose ids are not those of one node, or whose prompt is not the same any more."""
    return sum(
        one.answer.ids != two.answer.ids or one.messages != two.messages
        for each, other in zip(expected, agents, strict=True)
        for one, two in zip(each, other, strict=True)
    )


def _cold_differences(door: Node, agents: Sequence[Agent], options: argparse.Namespace) -> int:
    """Turns of a sample that have other ids alone and without a cache."""
    turns = [turn for agent in agents for turn in agent[1:]]
    sample = random.Random(0).sample(turns, min(options.cold, len(turns)))
    return sum(
        ask(door, turn.messages, options.tokens, cache=False).ids != turn.answer.ids
        for turn in sample
    )


# --------------------------------------------------------------------------- probes


def _probe(folder: Path, flags: Sequence[str], options: argparse.Namespace) -> int:
    """Second turns at the idle cluster, and after the second node left and came back."""
    with _pinned(folder / "one", 0, *flags) as one:
        peer = (*flags, "--peer", grpc_address(one))
        with _pinned(copy_key(one, folder / "two"), 1, *peer) as two:
            eventually(lambda: sees(one, 2), WITHIN_S)
            _place(one, 2)
            staying, leaving = (_first_turns(one, options, name) for name in ("stay", "leave"))
            time.sleep(ANNOUNCED_WITHIN_S)
            differences = _second_turns(one, staying, options, "second turns")
            _ = two.stop()
        _await_replicas(one, 1)
        with _pinned(folder / "two", 1, *peer):
            eventually(lambda: sees(one, 2), WITHIN_S)
            _await_replicas(one, 2)
            time.sleep(ANNOUNCED_WITHIN_S)
            title = "second turns after a node left and came back"
            return differences + _second_turns(one, leaving, options, title)


def _first_turns(door: Node, options: argparse.Namespace, seed: str) -> list[AgentTurn]:
    """First turns, all at once, so that each replica gets some."""

    def answer(number: int) -> AgentTurn:
        text = words(options.probe_first, f"{seed}/{number}")
        messages: list[Message] = [{"role": "user", "content": text}]
        return AgentTurn(messages, ask(door, messages, 16))

    with ThreadPoolExecutor(options.probes) as pool:
        return [*pool.map(answer, range(options.probes))]


def _second_turns(
    door: Node, first_turns: Sequence[AgentTurn], options: argparse.Namespace, title: str
) -> int:
    """Answers second turns one by one. Returns how many have other ids than without a cache."""
    ratios, in_place, differences, answers = list[float](), 0, 0, list[str]()
    for number, first in enumerate(first_turns):
        added = words(options.probe_added, f"{title}/{number}")
        messages = with_answer(first.messages, first.answer.text, added)
        warm = AgentTurn(messages, ask(door, messages, 16))
        cold = AgentTurn(messages, ask(door, messages, 16, cache=False))
        ratios.append(warm.answer.ttft_s / cold.answer.ttft_s)
        in_place += is_behind(first.answer, warm.answer)
        differences += warm.answer.ids != cold.answer.ids
        answers.append(
            f"  {warm.answer.prompt_tokens} tokens, {warm.answer.cached_tokens} in {warm.tier}, "
            f"{'the same' if warm.node == first.node else 'another'} node, first token "
            f"{warm.answer.ttft_s:.3f} s, cold {cold.answer.ttft_s:.2f} s: {ratios[-1]:.3f}"
        )
    print(f"{title}: {spread(ratios):.3f} of cold, {in_place} of {len(ratios)} in place")
    print(*answers, sep="\n", flush=True)
    return differences


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Agents at two replicas and at one node")
    _ = parser.add_argument("--agents", type=int, default=16)
    _ = parser.add_argument("--turns", type=int, default=6)
    _ = parser.add_argument("--first", type=int, default=1000, help="tokens of a first turn, about")
    _ = parser.add_argument("--added", type=int, default=200, help="tokens of a later turn, about")
    _ = parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    _ = parser.add_argument("--context", type=int, default=65_536, help="the model's own")
    _ = parser.add_argument("--repeats", type=int, default=1, help="0: only the probes")
    _ = parser.add_argument("--cold", type=int, default=4, help="turns that are read again cold")
    _ = parser.add_argument("--probes", type=int, default=4, help="0: none")
    _ = parser.add_argument("--probe-first", type=int, default=2000)
    _ = parser.add_argument("--probe-added", type=int, default=80)
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two nodes need two cores")
    return options


if __name__ == "__main__":
    sys.exit(main())
