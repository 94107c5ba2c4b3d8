"""The greedy identity matrix: every family, layout and precision, with every kind of drafts.

Each case answers with ours and compares the ids with mlx-lm's own `generate_step` on a model that
mlx-lm loaded itself. `bench/identity_matrix.py` runs all cases, `test_identity_matrix.py` a sample
in which every two values that can meet do.
"""

# mlx and mlx_lm are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

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
from tables import EndAt

from exo_node.mtp.drafters import NativeDrafter, NoDrafter
from exo_node.mtp.family import draft_logits
from exo_node.mtp.loop import Generation
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.seams import Drafter, Drafts, as_row
from exo_node.mtp.task import Task
from exo_node.mtp.types import Round, Sampling
from exo_node.shard.engine.local import LocalVerifier

Weights = Literal["float32", "bfloat16", "4-bit", "8-bit"]
Kind = Literal["head", "perfect", "adversarial"]

FAMILIES: tuple[Family, ...] = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v3", "glm4_moe")
DENSE = ("qwen3_5",)
LAYOUTS = ("raw", "converted")
WEIGHTS: tuple[Weights, ...] = ("float32", "bfloat16", "4-bit", "8-bit")
DEPTHS = (0, 1, 2, 3, 5)
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
        best, found = max(pairs, key=lambda each: len(each[1] & missing))
        sample.append(best)
        missing -= found
    return sample


class Scripted:
    """Drafts what plain decoding emits, or never that."""

    rests = False

    def __init__(self, k: int, prompt: int, ids: Sequence[int], shift: int) -> None:
        self.k = k
        self._prompt, self._ids, self._shift = prompt, ids, shift

    def draft(self, k: int, position: int) -> Drafts:
        start = position - self._prompt
        ids = [*self._ids, *[0] * k][start : start + k]
        return Drafts(as_row([(i + self._shift) % VOCABULARY for i in ids]), None)

    def observe(self, hidden: mx.array | None, tokens: mx.array) -> None:
        del hidden, tokens

    def catch_up(self) -> None:
        pass

    def arrays(self) -> list[mx.array]:
        return []


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
        wanted = spec(folder, 0, LAYERS, num_layers=LAYERS, dtype=dtype, native_mtp=True)
        loaded = load_quietly(wanted)
        assert loaded.head is not None, loaded.head_state
        self.engine: Any = engine_of(loaded, wanted)
        self._head: Any = loaded.head
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
        chooser = Sampler(Sampling(), 0)
        verifier = LocalVerifier(self.engine._target, self.engine._stage.make_caches())
        task = Task(self.prompt(case.length), TOKENS, CHUNK)
        drafter = self._drafter(case, chooser)
        steps = Generation(task, verifier, drafter, chooser, EndAt()).steps()
        rounds = [step for step in steps if isinstance(step, Round)]
        return [token for r in rounds for token in r.tokens], rounds

    def _drafter(self, case: Case, chooser: Sampler) -> Drafter:
        if case.k == 0:
            return NoDrafter()
        if case.kind == "head":
            family = self.engine.drafting._family
            logits = draft_logits(family, self._head)
            return NativeDrafter(self._head, family.embed, logits, chooser, case.k, overlap=True)
        shift = 0 if case.kind == "perfect" else 1
        return Scripted(case.k, case.length, self.reference(case.length), shift)


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
