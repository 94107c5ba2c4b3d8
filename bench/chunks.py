"""Compares the ids and the chunks of one prompt over restarts, two stages and two copies.

    python bench/chunks.py [--models-dir DIR --model ID] [--layers 16] [--rows 12000] [--tokens 64]
        [--gpus 1|2] [--embedders]

Real nodes: a first load; a start whose layers were timed meanwhile, which has to find the prompt on
disk; with two GPUs, one for each node, two stages and two copies. By default of a copy of the demo
model with a longer context. `--embedders`: the largest difference between six unlike inputs in one
request and alone, of the tests' encoders, in each dtype. Ends with status 1 if anything differs.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import conversation_turns
from conversation_turns import MODEL, TurnAnswer, ask, words
from embedders import ENCODERS, embedded, encoder_engine
from nodes import Node, copy_key, environment, eventually, grpc_address, node, sees

WITHIN_S = 400.0
INPUTS = (31, 3, 34, 770, 69, 86)
"""Rows of the inputs."""


def main() -> int:
    parser = argparse.ArgumentParser(description="One prompt over restarts, stages and copies")
    _ = parser.add_argument("--models-dir", type=Path)
    _ = parser.add_argument("--model", default=MODEL)
    _ = parser.add_argument("--layers", type=int, default=16)
    _ = parser.add_argument("--rows", type=int, default=12_000, help="of the prompt, about")
    _ = parser.add_argument("--tokens", type=int, default=64)
    _ = parser.add_argument("--gpus", type=int, default=1, choices=(1, 2))
    _ = parser.add_argument("--embedders", action="store_true")
    options = parser.parse_args()
    if options.embedders:
        return compare_embedders()
    with tempfile.TemporaryDirectory() as scratch:
        return Comparison(options, Path(scratch)).run()


class Comparison:
    """The cases, each against the first."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._flags = ("--no-mdns", "--models-dir", str(options.models_dir))
        if options.models_dir is None:
            self._flags = ("--no-mdns", *conversation_turns.long_model(folder / "models"))
        self._messages = [{"role": "user", "content": words(options.rows, "first")}]
        self._first: tuple[int, tuple[int, ...]] | None = None
        self._differ = False

    def run(self) -> int:
        for case in ("first load", "restart", "restart again"):
            with self._node("one", 0) as one:
                found = self._ask("case " + case, one)
                if case != "first load" and not found.cached_tokens:
                    print("  nothing was found on disk")
                    self._differ = True
                _ = self._ask("the same, not cached", one, cache=False)
                eventually(lambda one=one: one.stages()[0]["prefix_disk_bytes"] > 0, WITHIN_S)
                _ = one.stop()
        if self._options.gpus == 2:
            self._over_two()
        return self._differ

    def _over_two(self) -> None:
        half = self._options.layers // 2
        with ExitStack() as stack:
            one = stack.enter_context(self._node("one", 0))
            _ = copy_key(one, self._folder / "two")
            two = stack.enter_context(self._node("two", 1, "--peer", grpc_address(one)))
            eventually(lambda: sees(one, 2) and sees(two, 2), WITHIN_S)
            layers = [{"node": each.itself()["id"], "layers": half} for each in (one, two)]
            layers[1]["layers"] = self._options.layers - half
            for case, asked in (
                ("two stages", {"layers": layers}),
                ("two copies", {"replicas": 2}),
            ):
                body = {"model": self._options.model, **asked}
                reply = one.call("POST", "/v1/placements", body, timeout_s=WITHIN_S)
                assert reply.status == 200, reply
                copies = asked.get("replicas", 1)
                eventually(lambda copies=copies: len(_ready(one)) == copies, WITHIN_S)
                for _ in range(4):
                    _ = self._ask(case, one, cache=False)
                for each in _ready(one):
                    _ = one.call("DELETE", f"/v1/placements/{each['id']}", timeout_s=WITHIN_S)
                eventually(lambda: not _ready(one), WITHIN_S)

    def _node(self, name: str, gpu: int, *flags: str) -> AbstractContextManager[Node]:
        env = {**environment(), "CUDA_VISIBLE_DEVICES": str(gpu)}
        return node(self._folder / name, *self._flags, *flags, env=env, measures=True)

    def _ask(self, case: str, running: Node, **fields: object) -> TurnAnswer:
        fields = {"model": self._options.model, "num_draft_tokens": 0, "temperature": 0} | fields
        answer = ask(running, self._messages, self._options.tokens, **fields)
        chunks = {each["prefill_chunk"] for each in _ready(running)}
        got = max(chunks), answer.ids
        self._first = self._first or got
        same = got == self._first and len(chunks) == 1
        self._differ = self._differ or not same
        print(
            f"{case}: chunks of {sorted(chunks)}, {answer.cached_tokens} of {answer.prompt_tokens} "
            f"cached, first token {answer.ttft_s:.2f} s, {'same' if same else 'OTHER'} ids",
            flush=True,
        )
        return answer


def _ready(running: Node) -> Sequence[dict[str, int]]:
    placements = running.call("GET", "/v1/placements").body["data"]
    return [each for each in placements if each["status"] == "ready"]


def compare_embedders() -> int:
    differ = False
    for family in ENCODERS:
        for dtype in ("float32", "bfloat16"):
            engine = encoder_engine(family, dtype=dtype, prefill_chunk=512)
            inputs = {
                n: [(5 * i + n) % 90 + 5 for i in range(rows)] for n, rows in enumerate(INPUTS)
            }
            together = embedded(engine, inputs)
            alone = {n: embedded(engine, {n: ids})[n] for n, ids in inputs.items()}
            again = {n: embedded(engine, {n: ids})[n] for n, ids in inputs.items()}
            pairs = [zip(together[n], alone[n], strict=True) for n in inputs]
            worst = max(abs(a - b) for pair in pairs for a, b in pair)
            shares = engine.batching_reason or "inputs share forwards"
            print(f"{family}, {dtype}: {worst:.2g} apart; twice alike: {alone == again}; {shares}")
            differ = differ or worst > 1e-5 or alone != again
    return differ


if __name__ == "__main__":
    sys.exit(main())
