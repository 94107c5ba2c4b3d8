"""Measures the time to the first token of a conversation's turns after restarts of the node.

python bench/prefix_restart.py [--rows 8000] [--turns 6] [--k 3]

Each turn goes to a node that was just started, with a copy of the demo model that has a longer
context. The same request with `"cache": false` is the cold arm, in the same process.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engines import DEMO
from nodes import Node, node

MODEL = "demo-long"
CONTEXT = 16_384
SENTENCE = "Once upon a time a little dog lived in a house with a garden and a tree. "
MEASURED_TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description="Turns of a conversation after restarts")
    _ = parser.add_argument("--rows", type=int, default=8000, help="of the first turn")
    _ = parser.add_argument("--turns", type=int, default=6)
    _ = parser.add_argument("--k", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        environment = _long_model(folder)
        messages = [{"role": "user", "content": SENTENCE * (options.rows // 17)}]
        ratios = list[float]()
        for turn in range(1, options.turns + 1):
            flags = ("--no-mdns", "--dtype", "float32", "--models-dir", str(folder / "models"))
            with node(folder / "data", *flags, env=environment) as running:
                _ = running.chat("Hello.", model=MODEL, max_tokens=1, cache=False)  # loads it
                warm = _answer(running, messages, options.k)
                cold = _answer(running, messages, options.k, cache=False)
                _ = running.stop()
            assert warm["ids"] == cold["ids"]
            ratios.append(warm["ttft_s"] / cold["ttft_s"])
            print(
                f"turn {turn}: {warm['prompt_tokens']} tokens, {warm['cached_tokens']} cached, "
                f"first token after {1e3 * warm['ttft_s']:.0f} ms, "
                f"cold {1e3 * cold['ttft_s']:.0f} ms: {ratios[-1]:.3f}"
            )
            messages += [
                {"role": "assistant", "content": warm["text"]},
                {"role": "user", "content": f"Tell me more. {SENTENCE * 3}"},
            ]
        files = [*(folder / "data").glob("prefixes/*/*")]
        print(f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")
        print(f"median of turns 2 to {options.turns}: {statistics.median(ratios[1:]):.3f}")


def _answer(running: Node, messages: list[dict[str, str]], k: int, **fields: Any) -> dict[str, Any]:
    began_at, ttft_s, text, ids = time.perf_counter(), 0.0, "", list[int]()
    stats: Mapping[str, Any] = {}
    usage: Mapping[str, Any] = {}
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": MEASURED_TOKENS,
        "num_draft_tokens": k,
        "return_token_ids": True,
        **fields,
    }
    with running.stream("", **body) as events:
        for event in events:
            if event == "[DONE]":
                break
            stats = event.get("generation_stats") or stats
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                delta = choice["delta"].get("content") or ""
                if (delta or choice.get("token_ids")) and not ttft_s:
                    ttft_s = time.perf_counter() - began_at
                text += delta
                ids += choice.get("token_ids") or ()
    return {
        "ttft_s": ttft_s,
        "text": text,
        "ids": ids,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": stats["cached_tokens"],
    }


def _long_model(folder: Path) -> dict[str, str]:
    """A copy of the demo model with a longer context. Returns the node's environment."""
    copy = shutil.copytree(DEMO, folder / "models" / MODEL)
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = CONTEXT
    _ = (copy / "config.json").write_text(json.dumps(config))
    return {"EXO_PREFIX_DISK_GB": "1"}


if __name__ == "__main__":
    main()
