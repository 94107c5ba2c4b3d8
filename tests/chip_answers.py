"""Answers on stand-ins for Apple's chips, made in every way, beside those of K = 0 alone there.

Checkpoints are tiny and random, with a head that drafts right about every second time.
`bench/chip_identity.py` makes many of them, `test_chip_answers.py` some.
"""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
from chips import M1, M3, M3_MAX, M5, Chip, as_on_a_cpu, quantised
from engines import CHUNK, answer, changed, engine_of, load_quietly, request, spec
from forced_copies import FixedLength, force
from models import Family, make_checkpoint
from readers import GREEDY, SEEDED, Reader, prompt, together
from small import LAYERS, fit_head
from zoo_runs import rounds_of_two_stages

from exo_node.mtp.types import Round
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.model.load import Loaded

Score = tuple[int, object]
"""A token and its log-probabilities, those of the two most likely ones among them."""
Compared = tuple[str, list[Score], list[Score]]
"""How an answer was made, its scores, and those of K = 0 alone."""


@dataclass(frozen=True, slots=True)
class HeldBack(Chip):
    """A chip with borders that no test and no table has: {1, 2} {3 to 6} {7 to 10} rows of
    products, and attention that changes at 333 keys, and again at 1,777."""

    def quantised(self, rows: int, inputs: int, outputs: int, mode: str) -> str:
        return f"tiles of {(rows + 1) // 4}"

    def dense(self, rows: int, outputs: int, dtype: mx.Dtype) -> str:
        return f"dense tiles of {(rows + 1) // 4}"

    def attention(
        self, rows: int, keys: int, group: int, size: int, *, masked: bool, sinks: bool
    ) -> tuple[str, int]:
        if rows > 5 or rows * group > 27:
            return f"unfused, {rows} rows of {keys} keys", 1
        if keys < 333:
            return "one pass", 16
        return "two passes", 48 if keys < 1777 else 96


TOKENS: Final = 40
HELD_BACK: Final = HeldBack("held back", 15, "s")
BORDERS: Final = {
    M1: (4090,),
    M3: (4090,),
    M3_MAX: (1018, 8186),
    M5: (4090,),
    HELD_BACK: (327, 1771),
}
"""Rows of prompts whose answers cross a border."""
SHAPES: Final[dict[str, tuple[Family, dict[str, Any]]]] = {
    "2 heads for each key head": ("qwen3_5", {}),
    "4 heads": ("qwen3_5", {"num_key_value_heads": 1}),
    "6 heads": ("qwen3_5", {"num_attention_heads": 6, "num_key_value_heads": 1}),
    "8 heads": ("qwen3_5", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "windows": ("mimo_v2_flash", {"sliding_window": 128, "sliding_window_size": 128}),
    "a mixture": ("qwen3_5_moe", {}),
    "latent attention": ("deepseek_v3", {}),
}
QUANTISED: Final = {"4 bits": "affine", "mxfp4": "mxfp4"}
PRECISIONS: Final = (*QUANTISED, "float32", "bfloat16")
EXPERTS: Final = ("windows", "a mixture", "latent attention")
"""MLX multiplies experts that are not quantised on a CPU in float32 only."""


class Served:
    """One shape on one chip, with the answers of K = 0 alone."""

    def __init__(self, folder: Path, precision: str, rows: int) -> None:
        self._folder, self._rows = folder, rows
        self._dtype = "float32" if precision == "float32" else "bfloat16"
        self.loaded = self._load(precision)
        self._alone: dict[str, list[Score]] = {}

    def _spec(self, **changes: Any) -> Any:
        context = 9 * (self._rows + 200)  # shared by the requests of a batch
        fields: dict[str, Any] = {"native_mtp": True, "dtype": self._dtype}
        fields |= {"context_length": context}
        fields |= {"prefix_cache_bytes": 1 << 28}  # it decides where forwards over prompts end
        return spec(self._folder, 0, LAYERS, num_layers=LAYERS, **(fields | changes))

    def _load(self, precision: str) -> Loaded:
        if precision not in QUANTISED:
            return load_quietly(self._spec())
        with as_on_a_cpu():
            loaded = load_quietly(self._spec())
        return quantised(loaded, QUANTISED[precision])

    def engine(self, **changes: Any) -> TextEngine:
        engine = engine_of(self.loaded, self._spec(**changes))
        engine.measurements.batch_identity = "bitwise"
        engine.measurements.shares_prompts = True
        return engine

    def prompt(self, number: int) -> list[int]:
        """No two that are read together have as many rows."""
        end = prompt(number)
        more = self._rows - 3 * (number % 8) - len(end)
        return [*prompt(number, more), *end] if more > 0 else end

    def request(self, rows: Sequence[int], k: int = 0, **changes: Any) -> Any:
        fields = {"ignore_eos": True, "top_logprobs": 2} | changes
        return request(rows, k, TOKENS, **fields)

    def alone(self, rows: Sequence[int], how: Any, **changes: Any) -> list[Score]:
        key = repr((rows, how, changes))
        if key not in self._alone:
            engine = self.engine(batching=False, **changes)
            request = self.request(rows, sampling=how)
            self._alone[key] = scores(answer(engine, request).rounds)
        return self._alone[key]

    def answers(self, number: int) -> Iterator[Compared]:
        rows, how = self.prompt(number), (GREEDY, SEEDED)[number % 2]
        plain = self.alone(rows, how)
        for k in (1, 2, 3):
            drafted = answer(self.engine(), self.request(rows, k, sampling=how))
            yield f"K {k}", scores(drafted.rounds), plain
        yield "resumed", self._resumed(rows, how), plain
        yield from self._in_batch(number)
        yield from self._copied(rows)
        yield self._after_a_prefix(rows if self._rows else prompt(number, 520), how)
        model: Any = self.loaded.model.model
        split = rounds_of_two_stages(
            model,
            {"hidden_size": 64},
            2,
            CHUNK,
            TOKENS,
            rows,
            self._dtype,
            top_logprobs=2,
            turn_ends=cast("Any", self.loaded.codec).turn_ends,
        )
        yield "two stages", scores(split), self.alone(rows, GREEDY)
        yield "nothing cached", self.alone(rows, how, prefix_cache_bytes=0), plain

    def _after_a_prefix(self, rows: Sequence[int], how: Any) -> Compared:
        engine = self.engine()
        _ = answer(engine, changed(self.request(rows, 2), max_tokens=1))
        again = answer(engine, self.request(rows, 2, sampling=how))
        assert again.stats.cached_tokens, "no prefix was found"
        return "after a prefix", scores(again.rounds), self.alone(rows, how)

    def _resumed(self, rows: Sequence[int], how: Any) -> list[Score]:
        first = answer(self.engine(), self.request(rows, 2, sampling=how)).rounds
        log = first[: len(first) // 2]
        rest = self.request(rows, 2, sampling=how, attempt=2, replay=log)
        return scores(log) + scores(answer(self.engine(), rest).rounds)

    def _in_batch(self, number: int) -> Iterator[Compared]:
        size, k = 2 + number % 7, (0, 3)[number % 2]
        numbers = range(number, number + size)
        engine = self.engine()
        readers = [
            Reader(
                self.request(self.prompt(i), k, sampling=(GREEDY, SEEDED)[i % 2]),
                begins=2 * (i - number),
            )
            for i in numbers
        ]
        for reader in readers if self._rows else ():  # so that none waits for another's prompt
            _ = answer(engine, changed(reader.request, name="", max_tokens=1))
        together(engine, readers)
        for i, reader in zip(numbers, readers, strict=True):
            assert reader.fault is None, reader.fault
            plain = self.alone(self.prompt(i), (GREEDY, SEEDED)[i % 2])
            yield f"batch of {size}, K {k}", scores(reader.rounds), plain

    def _copied(self, rows: Sequence[int]) -> Iterator[Compared]:
        body = [token for token, _ in self.alone(rows, GREEDY)]
        repeated = [*rows, *body, *rows[-12:]]
        repeated = repeated[-self._rows :] if self._rows else repeated
        for length in (3, 7):
            engine = self.engine(prompt_lookup=True)
            force(engine.lookup, FixedLength(length))
            copied = answer(engine, self.request(repeated, prompt_lookup=True))
            yield f"copies of {length}", scores(copied.rounds), self.alone(repeated, GREEDY)


def checkpoint_of(folder: Path, shape: str) -> Path:
    """The random checkpoint of a shape, whose head drafts right about every second time."""
    family, changes = SHAPES[shape]
    made = folder / shape.replace(" ", "-")
    if not made.exists():
        _ = make_checkpoint(
            made,
            family,
            dtype="float32",
            layers=LAYERS,
            vocab=4096,
            raw=False,
            seed=7,
            changes=changes,
        )
        fit_head(made)
    return made


def scores(rounds: Sequence[Round]) -> list[Score]:
    return [pair for r in rounds for pair in zip(r.tokens, r.logprobs, strict=True)]


def differing(compared: Compared) -> tuple[int, int]:
    """How many ids, and how many log-probabilities, are not those of K = 0 alone."""
    _, got, plain = compared
    pairs = list(itertools.zip_longest(got, plain, fillvalue=(-1, ())))
    return sum(a[0] != b[0] for a, b in pairs), sum(a[1] != b[1] for a, b in pairs)
