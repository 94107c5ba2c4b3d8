"""Measures the time to the first token of a conversation's turns after restarts of the node.

    python bench/prefix_restart.py [--rows 8000] [--turns 6] [--k 3] [--added 120] [--stages 2]

Each turn goes to a node that was just started, with a copy of the demo model that has a longer
context. Then another turn of as many tokens finds the prefix in memory. The same request with
`"cache": false` is the cold arm, in the same process; that of the first turn is the first answer
itself. A turn of few rows ends no forward (`least_turn`), so the next one reads it again.

With `--stages 2` half of the layers are on a second node, which is stopped and started as well.
Ends with status 1 if the ids of a turn differ.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import conversation_turns
from conversation_turns import MODEL, Message, TurnAnswer, ask, with_answer, words
from nodes import Node, copy_key, eventually, grpc_address, node, sees

HEAD = "| turn | tokens | cached | first token, s | from memory, s | cold, s | ratio |"
TOKENS = 8
LAYERS = 16
WITHIN_S = 180.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Turns of a conversation after restarts")
    _ = parser.add_argument("--rows", type=int, default=8000, help="of the first turn, about")
    _ = parser.add_argument("--turns", type=int, default=6)
    _ = parser.add_argument("--k", type=int, default=3)
    _ = parser.add_argument("--added", type=int, default=120, help="tokens of a later turn, about")
    _ = parser.add_argument("--stages", type=int, default=1, choices=(1, 2))
    options = parser.parse_args()
    print(HEAD + "\n" + "|---" * HEAD.count(" | ") + "|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        flags = conversation_turns.long_model(folder / "models")
        k = options.k
        messages = [_user(words(options.rows, "first"))]
        ratios, has_same_ids = list[float](), True
        for turn in range(1, options.turns + 1):
            with restarted(folder, flags, options.stages) as running:
                warm = memory = cold = ask(running, messages, TOKENS, num_draft_tokens=k)
                if turn > 1:
                    other = [*messages[:-1], _user(words(options.added, f"{turn}, again"))]
                    memory = ask(running, other, TOKENS, num_draft_tokens=k)
                    cold = ask(running, messages, TOKENS, num_draft_tokens=k, cache=False)
            has_same_ids = has_same_ids and warm.ids == cold.ids
            ratios.append(warm.ttft_s / cold.ttft_s)
            print(_row(turn, warm, memory, cold), flush=True)
            messages = with_answer(messages, warm.text, words(options.added, f"{turn}"))
        files = [*folder.glob("*/prefixes/*/*")]
    print(f"{len(files)} files; the same ids: {has_same_ids}")
    print(
        f"turns 2 to {options.turns}: median {statistics.median(ratios[1:]):.3f}, "
        f"most {max(ratios[1:]):.3f}"
    )
    return 0 if has_same_ids else 1


def _row(turn: int, warm: TurnAnswer, memory: TurnAnswer, cold: TurnAnswer) -> str:
    counts = f"{warm.prompt_tokens} | {warm.cached_tokens}"
    times = f"{warm.ttft_s:.3f} | {memory.ttft_s:.3f} | {cold.ttft_s:.2f}"
    return f"| {turn} | {counts} | {times} | {warm.ttft_s / cold.ttft_s:.3f} |"


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


@contextmanager
def restarted(folder: Path, flags: Sequence[str], stages: int) -> Generator[Node]:
    """A node that was just started and has loaded the model, with a second one for two stages.

    Both are stopped at the end, as by `exo-node stop`.
    """
    flags = ("--no-mdns", *flags)
    with node(folder / "one", *flags) as one:
        if stages == 1:
            _load(one)
            yield one
            _ = one.stop()
            return
        other = folder / "two"
        if not other.exists():
            _ = copy_key(one, other)
        with node(other, *flags, "--peer", grpc_address(one)) as two:
            eventually(lambda: sees(one, 2) and sees(two, 2), WITHIN_S)
            halves = [{"node": each.itself()["id"], "layers": LAYERS // 2} for each in (one, two)]
            reply = one.call("POST", "/v1/placements", {"model": MODEL, "layers": halves})
            assert reply.status == 200, reply
            _load(one)
            yield one
            _ = one.stop()  # the second one would load its layers
            _ = two.stop()


def _load(running: Node) -> None:
    """Loads the model, as its first request does."""
    _ = ask(running, [_user("Hello.")], 1, cache=False)


if __name__ == "__main__":
    sys.exit(main())
