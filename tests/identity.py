"""The greedy identity matrix: every family, layout and precision, with every kind of drafts.

Each case answers with ours and compares the ids with mlx-lm's own `generate_step` on a model that
mlx-lm loaded itself. `bench/identity_matrix.py` runs all cases, `test_identity_matrix.py` a sample
in which every two values that can meet do.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from engines import engine_of, load_quietly, spec
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model
from models import Family, make_checkpoint

from exo_node.mtp.types import Round
from exo_node.shard.engine.drafter import DraftModel
from exo_node.shard.tools.bare_engine import bare_engine, bare_request, ids_of, rounds_of

Weights = Literal["float32", "bfloat16", "4-bit", "8-bit"]
Kind = Literal["head", "perfect", "adversarial"]

FAMILIES: tuple[Family, ...] = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v3", "glm4_moe")
DENSE = ("qwen3_5",)
LAYOUTS = ("raw", "converted")
WEIGHTS: tuple[Weights, ...] = ("float32", "bfloat16", "4-bit", "8-bit")
DEPTHS = (0, 1, 2, 3, 4, 5, 6, 7)
KINDS: tuple[Kind, ...] = ("head", "perfect", "adversarial")
CHUNK = 8
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1)
LAYERS = 4
TOKENS = 20
VOCABULARY = 4096
"""The demo's, whose tokenizer then fits."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the matrix. With `k` 0 nothing is drafted, whatever `kind` says."""

    family: Family
    layout: str
    weights: Weights
    k: int
    kind: Kind
    length: int

    def __str__(self) -> str:
        return "-".join(str(value) for value in astuple(self))


def all_cases() -> Iterator[Case]:
    """Every case that can be: only mlx-lm's layout is quantised, and on CPUs MLX multiplies
    gathered experts that are not quantised in float32 only."""
    for values in itertools.product(FAMILIES, LAYOUTS, WEIGHTS, DEPTHS, KINDS, LENGTHS):
        case = Case(*values)
        quantised = case.weights.endswith("bit")
        if quantised and case.layout == "raw":
            continue
        if case.weights == "bfloat16" and case.family not in DENSE:
            continue
        if case.k == 0 and case.kind != "head":
            continue
        yield case


def pairs_of(case: Case) -> set[tuple[int, object, int, object]]:
    """Every two of the case's values, with what they are values of."""
    values = list(enumerate(astuple(case)))
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(values, 2)}


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """A sample in which each pair of values occurs that occurs in `cases`: greedily, the case
    with the most pairs that no earlier one had; the same sample every time."""
    pairs = [(case, pairs_of(case)) for case in cases]
    missing = set[tuple[int, object, int, object]]().union(*(of for _, of in pairs))
    sample: list[Case] = []
    while missing:
        best, covered = max(pairs, key=lambda each: len(each[1] & missing))
        sample.append(best)
        missing -= covered
    return sample


def scripted(prompt: int, ids: Sequence[int], shift: int) -> DraftModel:
    """Drafts what plain decoding emits after a prompt of so many ids, or never that.

    The head's output names its row: row r tells of the token at r + 2.
    """
    target_ids = [0] * prompt + [(token + shift) % VOCABULARY for token in ids] + [0] * 16
    script = mx.array(target_ids, dtype=mx.int32)

    def head(hidden: mx.array, embedding: mx.array, cache: Any) -> mx.array:
        begin, rows = cache.offset, embedding.shape[1]
        _ = cache.update_and_fetch(embedding[:, None], embedding[:, None])
        del hidden
        return mx.arange(begin, begin + rows)[None, :, None]

    def logits(out: mx.array) -> mx.array:
        return (mx.arange(VOCABULARY) == script[out + 2]).astype(mx.float32)

    def embed(ids: mx.array) -> mx.array:
        return ids[..., None].astype(mx.float32)

    return DraftModel(head, embed, logits)


class Subject:
    """One checkpoint, loaded by us and by mlx-lm."""

    def __init__(self, folder: Path, family: Family, layout: str, weights: Weights) -> None:
        bits = int(weights[0]) if weights.endswith("bit") else 0
        dtype = "float32" if bits else weights
        _ = make_checkpoint(
            folder,
            family,
            dtype=dtype,
            layers=LAYERS,
            vocab=VOCABULARY,
            raw=layout == "raw",
            bits=bits,
            head_bits=bits,
            seed=7,
        )
        stage_spec = spec(folder, 0, LAYERS, num_layers=LAYERS, dtype=dtype, native_mtp=True)
        loaded = load_quietly(stage_spec)
        assert loaded.head is not None, loaded.head_state
        self.engine: Any = engine_of(loaded, stage_spec)
        self._folder = folder
        self._references: dict[int, list[int]] = {}

    @cached_property
    def _stock(self) -> Any:
        # Not strict: mlx-lm knows no tensors of draft heads in every family.
        return load_model(self._folder, strict=False)[0]

    def reference(self, length: int) -> list[int]:
        """mlx-lm's own answer."""
        if length not in self._references:
            steps = generate_step(
                mx.array(self.prompt(length)),
                self._stock,
                max_tokens=TOKENS,
                prefill_step_size=CHUNK,
            )
            self._references[length] = [int(token) for token, _ in steps]
        return self._references[length]

    @staticmethod
    def prompt(length: int) -> list[int]:
        return [(37 * i + 11) % 4000 for i in range(length)]

    def answer(self, case: Case) -> tuple[list[int], list[Round]]:
        """Our ids and rounds."""
        parts = (
            self.engine._target,
            self.engine._stage.make_caches,
            self._draft_model(case),
        )
        bench_request = bare_request(self.prompt(case.length), TOKENS, CHUNK, case.k)
        (rounds,) = rounds_of(bare_engine(*parts), [bench_request])
        return list(ids_of(rounds)), list(rounds)

    def _draft_model(self, case: Case) -> DraftModel | None:
        if case.k == 0:
            return None
        if case.kind == "head":
            return self.engine.drafting.model
        shift = 0 if case.kind == "perfect" else 1
        return scripted(case.length, self.reference(case.length), shift)


class Subjects:
    """Checkpoints by what they are, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, str, str], Subject] = {}

    def of(self, case: Case) -> Subject:
        key = (case.family, case.layout, case.weights)
        if key not in self._made:
            folder = self._folder / "-".join(key)
            self._made[key] = Subject(folder, case.family, case.layout, case.weights)
        return self._made[key]
