"""Memory over one answer of 10,000 tokens, with and without drafts.

    python bench/long_run.py [--tokens 10000]

Uses a tiny random model with the demo's tokenizer, whose memory grows with tokens in the same way.
Prints the bytes beside the caches and the buffers that MLX keeps for reuse, ten times in all.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))

from engines import ORACLE, whole_engine
from long_runs import growth, kept_after_clearing, memory_over
from models import make_checkpoint

LAYERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory over a long answer")
    _ = parser.add_argument("--tokens", type=int, default=10_000)
    tokens = int(parser.parse_args().tokens)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_checkpoint(Path(scratch) / "m", "qwen3_5", dtype="float32", vocab=4096)
        engine = whole_engine(
            folder, end_layer=LAYERS, num_layers=LAYERS, context_length=tokens + 100
        )
        for k in (0, 2):
            samples = memory_over(engine, ORACLE[0]["prompt_ids"], k, tokens, every=20)
            print(f"\nK={k}\n| tokens | beside the caches, bytes | kept for reuse, bytes |")
            print("|---|---|---|")
            for s in samples[:: max(1, len(samples) // 10)]:
                print(f"| {s.tokens} | {s.beside_caches} | {s.kept} |")
            print(f"growth beside the caches, first half to second: {growth(samples)}")
            print(
                f"kept for reuse right after it is freed, at most: {kept_after_clearing(samples)}"
            )


if __name__ == "__main__":
    main()
