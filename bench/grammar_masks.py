"""What a grammar costs for each token: the masks on the CPU, and their application to logits.

`python bench/grammar_masks.py [--model FOLDER]`: a checkpoint's tokenizer, or the demo's.
Text of each schema is fed token by token; the mask before each is timed, as is masking a row.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from exo_node.mtp.grammar import masked
from exo_node.shard.text.codec import TextCodec
from exo_node.shard.text.grammar import Gate
from exo_node.shard.text.grammars import GrammarSpec

DEMO: Final = Path(str(files("exo_node.shard"))) / "models" / "demo"
PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "mail": {"type": "string", "pattern": r"^[a-z.]+@[a-z]+\.(com|org)$"},
    },
    "required": ["name", "age", "tags", "mail"],
    "additionalProperties": False,
}
SAID: Final[dict[str, Any]] = {
    "name": "Ada Lovelace, who wrote the first program",
    "age": 36,
    "tags": ["red", "blue", "green"],
    "mail": "ada.l@engine.org",
}
CASES: Final[list[tuple[str, GrammarSpec, str]]] = [
    ("any JSON object", GrammarSpec("json_schema", '{"type": "object"}', "f"), json.dumps(SAID)),
    ("a strict schema", GrammarSpec("json_schema", json.dumps(PERSON), "f"), json.dumps(SAID)),
    (
        "a regular expression",
        GrammarSpec("regex", r"[a-z ]{40,60}\.", "f"),
        "the quick brown fox jumps over the lazy dogs.",
    ),
]


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds."""

    case: str
    compile: float
    median: float
    p99: float
    apply: float


def costs(codec: TextCodec, rounds: int) -> Iterator[Cost]:
    for name, spec, text in CASES:
        ids = codec.encode_text(text)
        times: list[float] = []
        compiled: list[float] = []
        mask: bytes | None = None
        for _ in range(rounds):
            began = time.perf_counter()
            grammar = codec.grammars.compile(spec, Gate())
            compiled.append(time.perf_counter() - began)
            for token in ids:
                began = time.perf_counter()
                grammar.take([token])
                (mask,) = grammar.masks([])
                times.append(time.perf_counter() - began)
            assert not grammar.failed, grammar.failed
        yield Cost(
            name,
            1e3 * statistics.median(compiled),
            1e3 * statistics.median(times),
            1e3 * statistics.quantiles(times, n=100)[98],
            1e3 * applied(mask),
        )


def applied(mask: bytes | None) -> float:
    """Seconds beyond those of the logits alone."""
    assert mask is not None
    logits = mx.zeros((1, 8 * len(mask) // 32 * 32), dtype=mx.bfloat16)
    mx.eval(logits)

    def seconds() -> float:
        began = time.perf_counter()
        mx.eval(masked(logits, [mask]))
        return time.perf_counter() - began

    return statistics.median(seconds() for _ in range(50))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    _ = parser.add_argument("--model", type=Path, default=DEMO)
    _ = parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    codec = TextCodec.load(asked.model)
    began = time.perf_counter()
    _ = codec.grammars.compile(CASES[0][1], Gate())
    print(f"the tokenizer's table, once: {1e3 * (time.perf_counter() - began):.0f} ms\n")
    print("| grammar | compile ms | mask ms, median | mask ms, 99 % | apply to a row ms |")
    print("|---|---|---|---|---|")
    for cost in costs(codec, asked.rounds):
        figures = " | ".join(f"{x:.3f}" for x in (cost.compile, cost.median, cost.p99, cost.apply))
        print(f"| {cost.case} | {figures} |")


if __name__ == "__main__":
    main()
