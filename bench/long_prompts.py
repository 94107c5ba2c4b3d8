"""Measures long prompts that nodes of one core each read together, against one node.

    python bench/long_prompts.py [--prompts 8000 16000] [--nodes 2] [--repeats 3] [--k 0]
        [--model demo-long | half] [--context 32768] [--kv-bits 8] [--any-kind]
    python bench/long_prompts.py --kills 60 [--prompts 3000] [--seed 1] [--any-kind]
    python bench/long_prompts.py --computed [--tokens-per-second 121.6]

Each arm has nodes of its own with empty data folders, one core each, and a copy of the model on
each; prompts are random ids, others in each repeat. The ids and log-probabilities of every answer
are compared with those of one node. A first prompt is not counted: with it, each machine checks the
layers of a new cut, once. `half` is a random model of half a billion parameters in 4 bits.
`--kv-bits` quantises attention's caches; with `--any-kind` nodes read with machines of any kind
(`EXO_READERS=any`), which here are of one. Needs a quiet machine with as many cores; Linux. Ends
with status 1 if an answer differs.

`--kills` kills or stops, at a random moment of a prompt's reading, the runner that reads or the one
that answers, so many times in turn, and compares the ids with those of a prompt that was left
alone. Ends with status 1 if an id differs or an answer is lost.

`--computed` measures nothing: what `placement/reading.py` expects for Qwen3.6-27B of nodes that
read so many tokens a second alone, over links of 1 and 10 GbE.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import conversation_turns
from models import make_checkpoint
from nodes import COMMAND, Node, copy_key, eventually, grpc_address, node, sees

from exo_node.placement.ids import NodeId
from exo_node.placement.reading import ReaderNode, ReadingSizes, plan_reading

WITHIN_S = 300.0
LOAD_S = 3600.0
"""Nodes of tests measure at load, which takes one core many minutes for `half`."""
TOKENS = 16
QWEN_27B = ReadingSizes(64, 512, 1024, 10_240, 1.17e6)
"""64 KiB of cache and 10 KiB of hidden state a token, 75 MB of recurrent states."""
GBIT = 125e6


def main() -> int:
    options = _options()
    if options.computed:
        _print_computed(options.tokens_per_second)
        return 0
    if options.kills:
        return _kill(options)
    answers: dict[int, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        flags = _model(Path(scratch) / "models", options.model, options.context)
        for count in (1, options.nodes):
            with _cluster(Path(scratch) / f"{count}", flags, options, count) as door:
                _ = _ask(door, options.model, _ids(options.prompts[0], -1), options.k)
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


def _kill(options: argparse.Namespace) -> int:
    """Strikes runners while prompts are read; the exit status."""
    draw, faults, gaps = random.Random(options.seed), 0, list[float]()
    with tempfile.TemporaryDirectory() as scratch:
        flags = _model(Path(scratch) / "models", options.model, options.context)
        folder = Path(scratch) / "kills"
        with _cluster(folder, flags, options, 2) as door, ThreadPoolExecutor(1) as pool:
            for number in range(options.kills):
                ids = _ids(options.prompts[0], number)
                expected = _ask(door, options.model, ids, options.k, cache=False)
                usual_s = expected["stats"]["time_to_first_token_s"]
                began = time.monotonic()
                answer = pool.submit(_ask, door, options.model, ids, options.k)
                time.sleep(draw.uniform(0.05, 0.6) * usual_s)
                busy = [] if answer.done() else _runners(door)
                how = draw.choice([signal.SIGKILL, signal.SIGSTOP])
                target = draw.choice(busy) if busy else None
                if target is not None:
                    os.kill(target["pid"], how)
                got = answer.result()
                gaps.append(time.monotonic() - began - usual_s)
                wrong = got["choice"]["token_ids"] != expected["choice"]["token_ids"]
                faults += wrong
                stats = got["stats"]
                # Whoever answered at its end may be another than whoever was struck.
                struck = "the answering one" if stats["resumes"] else "a reader"
                hit = "after its end" if target is None else f"{how.name} of {struck}"
                print(
                    f"{number}: {hit}, {gaps[-1]:+.1f} s, {stats['resumes']} resumed, "
                    f"{stats['read_reason'] or 'no reader'}{'; OTHER IDS' if wrong else ''}",
                    flush=True,
                )
                if target is not None and how == signal.SIGSTOP:
                    with suppress(ProcessLookupError):
                        os.kill(target["pid"], signal.SIGKILL)
                eventually(lambda: _ready(door) == 2, WITHIN_S)
    print(f"{faults} of {options.kills} had other ids; most {max(gaps):.1f} s later than usual")
    return 1 if faults else 0


def _runners(door: Node) -> list[dict[str, Any]]:
    nodes = door.call("GET", "/v1/cluster").body["nodes"]
    return [{**stage, "node": each["id"]} for each in nodes for stage in each["stages"]]


def _ask(door: Node, model: str, ids: Sequence[int], k: int, **fields: Any) -> dict[str, Any]:
    body = {
        "model": model, "prompt": list(ids), "max_tokens": TOKENS, "temperature": 0,
        "num_draft_tokens": k, "logprobs": 1, "return_token_ids": True,
    } | fields  # fmt: skip
    reply = door.call("POST", "/v1/completions", body, timeout_s=1800.0)
    assert reply.status == 200, reply
    return {"choice": reply.body["choices"][0], "stats": reply.body["generation_stats"]}


def _ids(rows: int, repeat: int) -> list[int]:
    draw = random.Random(f"{rows} {repeat}")
    return [draw.randrange(10, 4000) for _ in range(rows)]


def _model(folder: Path, name: str, context: int) -> tuple[str, ...]:
    """Writes the model into `folder`. Returns a node's flags."""
    if name == conversation_turns.MODEL:
        return conversation_turns.long_model(folder, context)
    changes = {"max_position_embeddings": context}
    _ = make_checkpoint(
        folder / name, "qwen3_5", layers=24, hidden=1024, vocab=4096, raw=False, bits=4,
        head_bits=4, changes=changes,
    )  # fmt: skip
    return ("--models-dir", str(folder))


@contextmanager
def _cluster(
    folder: Path, flags: Sequence[str], options: argparse.Namespace, count: int
) -> Generator[Node]:
    """The first of `count` nodes, each with a core and a copy of the model."""
    env = {"EXO_READERS": "any"} if options.any_kind else {}
    with ExitStack() as stack:
        first: Node | None = None
        for core in range(count):
            command = ("taskset", "--cpu-list", str(core), COMMAND)
            data = folder / f"n{core}"
            more = () if first is None else ("--peer", grpc_address(first))
            where = data if first is None else copy_key(first, data)
            started = node(where, "--no-mdns", *flags, *more, command=command, env=env)
            running = stack.enter_context(started)
            first = first or running
        assert first is not None
        eventually(lambda: sees(first, count), WITHIN_S)
        body = {"model": options.model, "replicas": count}
        if options.kv_bits:
            body["kv_bits"] = options.kv_bits
        placed = first.call("POST", "/v1/placements", body, timeout_s=LOAD_S)
        assert placed.status == 200, placed
        eventually(lambda: _ready(first) == count, LOAD_S)
        time.sleep(15.0 * (count > 1))  # links are measured
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
    _ = parser.add_argument(
        "--model", choices=[conversation_turns.MODEL, "half"], default=conversation_turns.MODEL
    )
    _ = parser.add_argument("--context", type=int, default=32_768)
    _ = parser.add_argument("--kv-bits", type=int, choices=[0, 4, 8], default=0)
    _ = parser.add_argument("--any-kind", action="store_true")
    _ = parser.add_argument("--kills", type=int, default=0)
    _ = parser.add_argument("--seed", type=int, default=1)
    _ = parser.add_argument("--computed", action="store_true")
    _ = parser.add_argument("--tokens-per-second", type=float, default=121.6)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
