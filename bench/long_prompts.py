"""Measures long prompts that nodes of one core each read together, against one node.

    python bench/long_prompts.py [--prompts 8000 16000] [--nodes 2] [--repeats 3] [--k 0]
        [--model demo | half] [--context 32768]
    python bench/long_prompts.py --computed [--tokens-per-second 121.6]

Each arm has nodes of its own with empty data folders, one core each, and a copy of the model on
each; prompts are random ids, others in each repeat. The ids and log-probabilities of every answer
are compared with those of one node. `half` is a random model of half a billion parameters in 4
bits. Needs a quiet machine with as many cores; Linux. Ends with status 1 if an answer differs.

`--computed` measures nothing: what `placement/reading.py` expects for Qwen3.6-27B of nodes that
read so many tokens a second alone, over links of 1 and 10 GbE.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import conversation_turns
from models import make_checkpoint
from nodes import COMMAND, Node, copy_key, eventually, grpc_address, node, sees

from exo_node.placement.ids import NodeId
from exo_node.placement.reading import ReaderNode, ReadingSizes, plan_reading

WITHIN_S = 300.0
TOKENS = 16
QWEN_27B = ReadingSizes(64, 512, 1024, 10_240, 1.17e6)
"""64 KiB of cache and 10 KiB of hidden state a token, 75 MB of recurrent states."""
GBIT = 125e6


def main() -> int:
    options = _options()
    if options.computed:
        _print_computed(options.tokens_per_second)
        return 0
    answers: dict[int, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        flags = _model(Path(scratch) / "models", options.model, options.context)
        for count in (1, options.nodes):
            with _cluster(Path(scratch) / f"{count}", flags, options.model, count) as door:
                answers[count] = [
                    _ask(door, options.model, _ids(rows, repeat), options.k)
                    for rows in options.prompts
                    for repeat in range(options.repeats)
                ]
    differences = 0
    for index, rows in enumerate(options.prompts):
        some = slice(index * options.repeats, (index + 1) * options.repeats)
        one, several = answers[1][some], answers[options.nodes][some]
        ratios = [
            b["stats"]["time_to_first_token_s"] / a["stats"]["time_to_first_token_s"]
            for a, b in zip(one, several, strict=True)
        ]
        differences += sum(a["choice"] != b["choice"] for a, b in zip(one, several, strict=True))
        seconds = [each["stats"]["time_to_first_token_s"] for each in one]
        print(
            f"{rows} tokens: one node {statistics.median(seconds):.1f} s, {options.nodes} nodes "
            f"{statistics.median(ratios):.2f} of it ({min(ratios):.2f} to {max(ratios):.2f}); "
            f"{several[-1]['stats']['read_reason']}"
        )
    print(f"answers with other ids or log-probabilities: {differences}")
    return 1 if differences else 0


def _ask(door: Node, model: str, ids: Sequence[int], k: int) -> dict[str, Any]:
    body = {
        "model": model, "prompt": list(ids), "max_tokens": TOKENS, "temperature": 0,
        "num_draft_tokens": k, "logprobs": 1, "return_token_ids": True,
    }  # fmt: skip
    reply = door.call("POST", "/v1/completions", body, timeout_s=1800.0)
    assert reply.status == 200, reply
    return {"choice": reply.body["choices"][0], "stats": reply.body["generation_stats"]}


def _ids(rows: int, repeat: int) -> list[int]:
    draw = random.Random(f"{rows} {repeat}")
    return [draw.randrange(10, 4000) for _ in range(rows)]


def _model(folder: Path, name: str, context: int) -> tuple[str, ...]:
    """Writes the model into `folder`. Returns a node's flags."""
    if name == "demo":
        return conversation_turns.long_model(folder, context)
    changes = {"max_position_embeddings": context}
    _ = make_checkpoint(
        folder / name, "qwen3_5", layers=24, hidden=1024, vocab=4096, raw=False, bits=4,
        head_bits=4, changes=changes,
    )  # fmt: skip
    return ("--models-dir", str(folder))


@contextmanager
def _cluster(folder: Path, flags: Sequence[str], model: str, count: int) -> Generator[Node]:
    """The first of `count` nodes, each with a core and a copy of the model."""
    with ExitStack() as stack:
        first: Node | None = None
        for core in range(count):
            command = ("taskset", "--cpu-list", str(core), COMMAND)
            data = folder / f"n{core}"
            more = () if first is None else ("--peer", grpc_address(first))
            where = data if first is None else copy_key(first, data)
            started = node(where, "--no-mdns", *flags, *more, command=command)
            running = stack.enter_context(started)
            first = first or running
        assert first is not None
        eventually(lambda: sees(first, count), WITHIN_S)
        body = {"model": model, "replicas": count}
        assert first.call("POST", "/v1/placements", body).status == 200
        eventually(lambda: _ready(first) == count, WITHIN_S)
        yield first


def _ready(door: Node) -> int:
    placements = door.call("GET", "/v1/placements").body["data"]
    return sum(each["status"] == "ready" for each in placements)


def _print_computed(tokens_per_second: float) -> None:
    own_s = 1 / tokens_per_second / QWEN_27B.layers
    for gigabits in (1, 10):
        for rows in (8192, 49_000):
            alone = rows / tokens_per_second
            shares = list[str]()
            for count in range(2, 6):
                readers = [
                    ReaderNode(NodeId(f"n{i}"), own_s, 1e-3, gigabits * GBIT)
                    for i in range(1, count)
                ]
                plan = plan_reading(rows, 0, own_s, readers, QWEN_27B, {})
                shares.append(f"{count}: {plan.seconds:.0f} s ({plan.seconds / alone:.2f})")
            print(f"{gigabits} GbE, {rows} tokens, alone {alone:.0f} s; {', '.join(shares)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Long prompts that nodes read together")
    _ = parser.add_argument("--prompts", type=int, nargs="+", default=[8000, 16_000])
    _ = parser.add_argument("--nodes", type=int, default=2)
    _ = parser.add_argument("--repeats", type=int, default=3)
    _ = parser.add_argument("--k", type=int, default=0)
    _ = parser.add_argument("--model", choices=["demo", "half"], default="demo")
    _ = parser.add_argument("--context", type=int, default=32_768)
    _ = parser.add_argument("--computed", action="store_true")
    _ = parser.add_argument("--tokens-per-second", type=float, default=121.6)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
