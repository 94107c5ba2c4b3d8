"""Adds up what prefixes on disk do while an answer is in progress.

    python bench/prefix_calls.py [--conversations 20] [--turns 3] [--first 150] [--added 130]
        [--tokens 64] [--k 2]

Tokens a second with files and without differ by more than the cost that they should show, so this
adds the cost itself up: one engine of the demo model, on a compute thread like a runner's, answers
the turns of conversations. Writes begin between turns, and each turn begins 2 ms after a write did,
so that most of them are given up. Counted are the seconds of every call of the disk tier on the
compute thread while an answer is in progress, and those in which its thread still wrote beside the
answer, as if that thread stopped the answer altogether. The bound is the share of the answers'
time that is left. Ends with status 1 if nothing was written.
"""

import argparse
import functools
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exo_node.shard.model import loader_import  # before MLX, so that products of our own may be

# isort: split
from drafting_clients import EngineClient
from engines import load_quietly, spec

from exo_node.mtp.types import Sampling
from exo_node.shard.checkpoint.prefix_files import StoredTensor
from exo_node.shard.engine.compute import ComputeThread
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.engine.prefix_disk import PrefixDisk
from exo_node.shard.engine.request import EngineRequest
from exo_node.shard.engine.text_engine import TextEngine

LOADER = loader_import.__name__
CONTEXT = 4096
CALLS = ("pause", "ends", "find", "add")
"""Methods of the disk tier that run while an answer is in progress."""


class TimedDisk(PrefixDisk):
    """A disk tier that adds up the seconds of its calls and of writes beside answers."""

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        self.seconds: dict[str, float] = dict.fromkeys((*CALLS, "write beside"), 0.0)
        self.writes = 0
        self.began_at = 0.0
        """When the last request began."""
        for name in CALLS:
            setattr(self, name, self._timed(name, getattr(self, name)))

    def _timed(self, name: str, call: Any) -> Any:
        @functools.wraps(call)
        def timed(*fields: Any, **named: Any) -> Any:
            began_at = time.perf_counter()
            if name == "pause":
                self.began_at = began_at
            try:
                return call(*fields, **named)
            finally:
                self.seconds[name] += time.perf_counter() - began_at

        return timed

    def _write(
        self,
        chain: Sequence[str],
        description: Mapping[str, Any],
        tensors: Mapping[str, StoredTensor],
    ) -> None:
        began_at = time.perf_counter()
        super()._write(chain, description, tensors)
        self.writes += 1
        if self.began_at > began_at:
            self.seconds["write beside"] += time.perf_counter() - self.began_at


class DemoEngine:
    """An engine of the demo model with such a tier."""

    def __init__(self, root: Path, k: int) -> None:
        self._root, self._k = root, k
        self._compute = ComputeThread()
        self._names = iter(range(10**9))
        self.disk: TimedDisk | None = None
        self.turn_end = 0
        self.engine: TextEngine = self.run(self._load)

    def _load(self) -> TextEngine:
        loaded = load_quietly(spec(native_mtp=True))
        assert loaded.codec is not None
        self.turn_end = min(loaded.codec.end_tokens)
        self.disk = TimedDisk(self._root, "demo", 1 << 30, loaded.model.make_caches, "demo")
        options = EngineOptions(
            "float32", CONTEXT, max_draft_tokens=self._k, prefix_cache_bytes=1 << 30
        )
        engine = TextEngine(loaded, options, prefix_disk=self.disk)
        engine.measurements.measure()
        return engine

    def run(self, job: Any) -> Any:
        """The result of a job on the compute thread."""
        return self._compute.submit(job).result()

    def answer(self, prompt: list[int], tokens: int) -> list[int]:
        fields = str(next(self._names)), 1, prompt, Sampling(), tokens, (), self._k, ""
        client = EngineClient(EngineRequest(*fields, ignore_end=True))
        client.drive(self._compute, self.engine)
        client.wait()
        return client.ids

    def close(self) -> None:
        self._compute.close()


def main() -> int:
    options = _options()
    answers_s, turns, wrote = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        subject = DemoEngine(Path(scratch), options.k)
        disk = subject.disk
        assert disk is not None
        end = subject.turn_end
        for number in range(-1, options.conversations):
            draw, prompt = random.Random(number), list[int]()
            if number == 0:  # the first one warms up
                disk.seconds, disk.writes = dict.fromkeys(disk.seconds, 0.0), 0
                answers_s, turns = 0.0, 0
            for turn in range(options.turns):
                rows = options.added if turn else options.first
                prompt += [*(draw.randrange(8, 4000) for _ in range(rows)), end, 5, 6, 7]
                began_at = time.perf_counter()
                prompt += [*subject.answer(prompt, options.tokens), end]
                answers_s += time.perf_counter() - began_at
                turns += 1
                if subject.run(subject.engine.save_prefix):
                    time.sleep(0.002)
            while subject.run(subject.engine.save_prefix):
                time.sleep(0.001)
        wrote = sum(path.stat().st_size for path in Path(scratch).glob("*/*"))
        writes = disk.writes
        total_s = sum(disk.seconds.values())
        subject.close()
    for name, seconds in disk.seconds.items():
        print(f"{name}: {1000 * seconds / turns:.3f} ms a turn")
    print(
        f"{turns} turns of {1000 * answers_s / turns:.0f} ms, {writes} writes begun, {wrote} bytes"
    )
    print(f"at least {1 - total_s / answers_s:.4f} of the answers' time is left")
    return 0 if wrote else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    _ = add("--conversations", type=int, default=20)
    _ = add("--turns", type=int, default=3)
    _ = add("--first", type=int, default=150, help="ids of a first turn")
    _ = add("--added", type=int, default=130, help="ids of a later turn")
    _ = add("--tokens", type=int, default=64, help="of an answer")
    _ = add("--k", type=int, default=2, help="drafts a round")
    return parser.parse_args()


if __name__ == "__main__":
    status = main()
    _ = sys.stdout.flush()
    os._exit(status)  # without waiting for MLX's threads, as a runner
