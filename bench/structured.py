"""Structured output on the demo model: checks that documents are valid, and times masks.

    python bench/structured.py documents [--schemas 200] [--k 2] [--minutes 5] [--kept FILE]
    python bench/structured.py cost [--repeats 15] [--tokens 150]

`documents` gives random schemas to a model that is bad at JSON, in batches, with drafts and
without: every answer must parse, fit its schema, and have the same ids both times. `--kept` has a
line for each batch, and a later run continues after them; `--minutes` limits the time in which
batches start. `cost` answers the same prompt under a grammar that allows everything and under none,
in turns: the ids are the same, so the difference of times is the cost of masks. Ends with status 1
if an answer has a fault.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engines import ORACLE, answer, request, whole_engine
from jsonschema import Draft202012Validator
from models import DEMO
from random_schemas import random_schema
from readers import Reader, together

from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.request import Parameters
from exo_node.shard.text.codec import TextCodec
from exo_node.shard.text.grammars.grammar import Gate, TokenGrammar
from exo_node.shard.text.grammars.grammars import GrammarSpec

TOGETHER = 16
MAX_TOKENS = 1500
PROMPT: list[int] = ORACLE[0]["prompt_ids"]
ANYTHING = GrammarSpec("regex", r"(?s:.*)", "regex")


def documents(schemas: int, k: int, minutes: float, batch_file: Path | None) -> int:
    """The number of answers with faults."""
    batches = _lines(batch_file)
    served, codec, start_s = whole_engine(batching=True), TextCodec.load(DEMO), time.monotonic()
    while (start := _schema_count(batches)) < schemas and time.monotonic() < start_s + 60 * minutes:
        seeds = range(start, min(start + TOGETHER, schemas))
        batches.append(_together(served, codec, seeds, k))
        print(
            f"{seeds.stop} schemas, {sum(len(one['faults']) for one in batches)} faults", flush=True
        )
        if batch_file is not None:
            with batch_file.open("a") as file:
                _ = file.write(json.dumps(batches[-1]) + "\n")
    for each in ("0", str(k)):
        tokens, proposed, accepted = (sum(one[each][at] for one in batches) for at in range(3))
        share = f", {accepted / proposed:.1%} of {proposed} drafts accepted" if proposed else ""
        print(f"K={each}: {tokens} tokens in {_schema_count(batches)} documents{share}")
    return sum(len(one["faults"]) for one in batches)


def _lines(batch_file: Path | None) -> list[dict[str, Any]]:
    if batch_file is None or not batch_file.exists():
        return []
    return [json.loads(line) for line in batch_file.read_text().splitlines()]


def _schema_count(batches: Sequence[dict[str, Any]]) -> int:
    return batches[-1]["first"] + batches[-1]["schemas"] if batches else 0


def _together(served: TextEngine, codec: TextCodec, seeds: range, k: int) -> dict[str, Any]:
    """One batch: its faults in words, and by K its tokens, proposed and accepted drafts."""
    counts: dict[int, list[int]] = {0: [0, 0, 0], k: [0, 0, 0]}
    ids_by_k = {each: _batch(served, seeds, each, counts[each]) for each in (0, k)}
    faults = [
        f"schema {seed}: other ids with drafts"
        for at, seed in enumerate(seeds)
        if ids_by_k[0][at] != ids_by_k[k][at]
    ]
    whole = [(seed, _fault(codec, seed, ids_by_k[k][at])) for at, seed in enumerate(seeds)]
    faults += [f"schema {seed}: {why}" for seed, why in whole if why is not None]
    for fault in faults:
        print(fault, flush=True)
    by_k = {str(each): of for each, of in counts.items()}
    return {"first": seeds.start, "schemas": len(seeds), **by_k, "faults": faults}


def _batch(served: TextEngine, seeds: Sequence[int], k: int, counts: list[int]) -> list[list[int]]:
    readers = [Reader(_request(served, seed, k)) for seed in seeds]
    together(served, readers)
    for reader in readers:
        if reader.fault is not None:
            raise reader.fault
        assert reader.end is not None
        stats = reader.end.stats
        counts[0] += len(reader.ids)
        counts[1] += stats.proposed_draft_tokens
        counts[2] += stats.accepted_draft_tokens
    return [list(reader.ids) for reader in readers]


def _request(served: TextEngine, seed: int, k: int) -> Parameters:
    spec = GrammarSpec("json_schema", json.dumps(random_schema(seed)), "schema")
    grammar = served.codec.grammars.compile(spec, Gate())
    return request(PROMPT, k, MAX_TOKENS, grammar=grammar)


def _fault(codec: TextCodec, seed: int, ids: Sequence[int]) -> str | None:
    validator: Any = Draft202012Validator(random_schema(seed))
    try:
        document = json.loads(codec.decode(ids[:-1]))
    except ValueError as fault:
        return f"no document after {len(ids)} tokens: {fault}"
    return next((str(fault.message) for fault in validator.iter_errors(document)), None)


class Seconds(NamedTuple):
    """Wall-clock seconds, and CPU seconds of all threads, which other programs affect less."""

    wall: float
    cpu: float


class TimedGrammar(TokenGrammar):
    """A grammar that counts the CPU seconds of its own work."""

    seconds = 0.0
    rows = 0

    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        start = time.thread_time()
        masks = super().masks(drafts)
        TimedGrammar.seconds += time.thread_time() - start
        TimedGrammar.rows += len(masks)
        return masks


def cost(repeats: int, tokens: int) -> int:
    served, wrong = whole_engine(), 0
    print(
        "| | relative to no grammar | of CPU | extra CPU, microseconds a token |\n|---|---|---|---|"
    )
    for k in (0, 1, 2, 3):
        free, bound = list[Seconds](), list[Seconds]()
        for number in range(repeats + 1):
            arms = {"free": free, "bound": bound}
            ids = dict[str, Sequence[int]]()
            for name in sorted(arms, reverse=bool(number % 2)):
                ids[name], took = _time_answer(served, k, tokens, bound=name == "bound")
                if number:  # the first one warms up
                    arms[name].append(Seconds(*(each / len(ids[name]) for each in took)))
            wrong += list(ids["free"]) != list(ids["bound"])
        pairs = list(zip(free, bound, strict=True))
        ratio = statistics.median(f.wall / b.wall for f, b in pairs)
        share = statistics.median(f.cpu / b.cpu for f, b in pairs)
        extra = statistics.median(b.cpu - f.cpu for f, b in pairs)
        print(f"| K={k} | {ratio:.3f} | {share:.3f} | {1e6 * extra:.0f} |", flush=True)
    _mask_alone(served)
    return wrong


def _time_answer(
    served: TextEngine, k: int, tokens: int, *, bound: bool
) -> tuple[Sequence[int], Seconds]:
    grammar = served.codec.grammars.compile(ANYTHING, Gate()) if bound else None
    engine_request = request(PROMPT, k, tokens, grammar=grammar)
    start, spent = time.perf_counter(), time.process_time()
    reply = answer(served, engine_request)
    return reply.ids, Seconds(time.perf_counter() - start, time.process_time() - spent)


def _mask_alone(served: TextEngine) -> None:
    """Prints the CPU time of a mask for several grammars."""
    for seed in range(6):
        grammar = _request(served, seed, 0).grammar
        assert isinstance(grammar, TokenGrammar)
        grammar.__class__ = TimedGrammar
        _ = answer(served, request(PROMPT, 0, MAX_TOKENS, grammar=grammar))
    each = 1e6 * TimedGrammar.seconds / TimedGrammar.rows
    print(
        f"\nThe grammar itself: {each:.0f} microseconds of CPU a mask (random schemas, 4096 ids)."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    _ = parser.add_argument("what", choices=("documents", "cost"))
    _ = parser.add_argument("--schemas", type=int, default=200)
    _ = parser.add_argument("--k", type=int, default=2)
    _ = parser.add_argument("--minutes", type=float, default=float("inf"))
    _ = parser.add_argument("--kept", type=Path)
    _ = parser.add_argument("--repeats", type=int, default=15)
    _ = parser.add_argument("--tokens", type=int, default=150)
    options = parser.parse_args()
    if options.what == "documents":
        schemas, k = cast(int, options.schemas), cast(int, options.k)
        minutes, batch_file = cast(float, options.minutes), cast("Path | None", options.kept)
        return int(documents(schemas, k, minutes, batch_file) > 0)
    return int(cost(cast(int, options.repeats), cast(int, options.tokens)) > 0)


if __name__ == "__main__":
    sys.exit(main())
