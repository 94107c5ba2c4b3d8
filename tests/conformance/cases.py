"""The table of the conformance corpus: every way to decode, as pure data.

A `Question` is a prompt with options: plain decoding of one request decides its ids. A `Case` asks
one or several questions in one way. Since all ways give the ids of plain decoding, cases share
questions.

Left out, and why:

- Pipelines and windows have K = 0 only: the product drafts for whole models with a head, and no
  family with windows has one.
- Unquantised experts (`experts`) have no bfloat16: MLX does not multiply them on a CPU.
- Rounds overlap for K > 0 and the caches `KVCache` and `ArraysCache` only, so not over quantised
  ones. Options that need what was committed (seeds, penalties, grammars, log-probabilities) wait.
- Kernels that leave states on the device (`kernels`) exist for gated delta in float32; their twin
  on the CPU is `plain_gated_delta.py`.
- Batches of `uneven`: beside others an answer has forwards that it would not have alone.
- Grammars in bfloat16: of the few tokens that one allows, two are too often as good.
- Samples without a seed: what names their noise is no promise, only their distribution is
  (`tests/mtp/test_distribution.py`).
- Adaptive depths, heads that rest, and drafts that are copied from the prompt: a clock decides
  about them. `tests/mtp/test_copied_drafts.py` compares copies with plain decoding.
- Cancelled answers: one of each batch is cancelled, and only what it gave before is compared.
- Losses of one stage while others keep their state, and prefixes on disk: a resume here has the log
  alone, as every resume of the new engine will.
- bfloat16, the mixed options, 3 stages and the demo appear where float32, single options, 2 stages
  and tiny models leave a doubt, not at every K.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from engines import ORACLE

Model = Literal[
    "full", "hybrid", "window", "latent", "quantised", "experts", "kernels", "uneven", "demo"
]
"""Kinds of caches: full attention, gated delta, a sliding window, latents, 8 bits. Then gated delta
with experts; as kernels compute it; and uneven, so that numbers depend on the rows of a forward, as
on a GPU. The demo checkpoint is trained."""
Dtype = Literal["float32", "bfloat16"]
Way = Literal["alone", "overlapped", "batch", "stages", "prefix", "resumed"]
Option = Literal[
    "plain", "stop", "last", "seeded", "penalised", "logprobs", "grammar", "barred", "mixed"
]
"""`stop`: a string ends the answer in its middle. `last`: it stands at the end of the budget.
`logprobs` are those under penalties. `barred`: the likeliest token ends the answer, once it has
enough others. `mixed`: each request of a batch has another option, and a K of its own."""
Cut = Literal["first", "middle", "last"]
"""The end of a log: after the first round, in the middle, before the last round."""

CUTS: Final[tuple[Cut, ...]] = ("first", "middle", "last")
MOST: Final = 7
"""Drafts of a round at most."""
CHUNK: Final = 32
"""Rows of a prompt's forward."""
FIRST_TURN: Final = 40
"""Rows that a prompt after a prefix shares with the one before it."""
SECOND_TURN: Final = 70
ROWS: Final = (9, 5, 14, 36, 7)
"""Rows of the prompts of a batch; the last request is cancelled."""
TOKENS: Final = (24, 14, 20, 18, 24)
ROUNDED_TOKENS: Final = (14, 12, 13, 12, 12)
"""In bfloat16, where long answers without a near-tie are rare."""
STEPS: Final = (0, 0, 3, 5, 2)
"""The turn at which each request of a batch arrives."""
CANCELLED: Final = 4
CANCELLED_AT: Final = 12
MIXED: Final[tuple[tuple[Option, int], ...]] = (
    ("plain", 3),
    ("seeded", 0),
    ("penalised", 2),
    ("grammar", 1),
)
VOCABULARY: Final = 4000
"""Ids of prompts; above them are the tokenizer's special tokens."""

DRAFTING: Final[tuple[Model, ...]] = ("full", "hybrid", "latent", "quantised")
CACHES: Final[tuple[Model, ...]] = (*DRAFTING, "window")
DTYPES: Final[tuple[Dtype, ...]] = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its options, of which one request alone decides the ids.

    Its rounds draft `k` tokens. Ids of `uneven` alone depend on that; all others are those of plain
    decoding.
    """

    model: Model
    dtype: Dtype
    option: Option
    number: int
    turns: int = 1
    k: int = 0

    def __str__(self) -> str:
        parts = [self.model, self.dtype, self.option]
        parts += ["two turns" if self.turns == 2 else f"prompt {self.number}"]
        parts += [f"k{self.k}"] if self.k else []
        return " ".join(parts)

    @property
    def rows(self) -> int:
        return SECOND_TURN if self.turns == 2 else ROWS[self.number]

    @property
    def tokens(self) -> int:
        """The answer's budget."""
        if self.option == "grammar":
            return 40
        if self.turns == 2:
            return 12
        return (TOKENS if self.dtype == "float32" else ROUNDED_TOKENS)[self.number]

    def prompt(self, seed: int) -> list[int]:
        if self.model == "demo":
            return self._oracle_prompt(seed)
        draw = random.Random(f"{self.number} {self.turns} {seed}")
        return [draw.randrange(3, VOCABULARY) for _ in range(self.rows)]

    def _oracle_prompt(self, seed: int) -> list[int]:
        row, following = (ORACLE[(seed + self.number + i) % len(ORACLE)] for i in (0, 1))
        if self.turns == 1:
            return row["prompt_ids"]
        return [*row["prompt_ids"], *row["greedy_ids"], *following["prompt_ids"]]


@dataclass(frozen=True, slots=True)
class Case:
    """One way to decode one question or a batch of them.

    `together`: several requests; on several stages they share forwards. `k`: drafts of a round.
    """

    way: Way
    model: Model
    dtype: Dtype = "float32"
    k: int = 0
    option: Option = "plain"
    together: bool = False
    stages: int = 1
    cut: Cut | None = None

    def __str__(self) -> str:
        parts = [self.way]
        parts += [f"after {self.cut}"] if self.cut else []
        parts += [f"{self.stages} stages"] if self.stages > 1 else []
        parts += ["together"] if self.together and self.way != "batch" else []
        parts += [self.model, self.dtype, "k mixed" if self.option == "mixed" else f"k{self.k}"]
        return "/".join([*parts, self.option])

    @property
    def is_quick(self) -> bool:
        """Whether it belongs to the part of the suite that always runs."""
        return (
            self.dtype == "float32"
            and self.k in (0, 2)
            and self.model not in ("demo", "experts")
            and self.stages < 3
            and self.cut in (None, "middle")
            and (self.option == "plain" or self.model != "full")
        )

    @property
    def weights(self) -> Model:
        """The model whose plain decoding decides the ids."""
        return "hybrid" if self.model == "kernels" else self.model

    @property
    def questions(self) -> list[tuple[Question, int]]:
        """The questions of a case, each with its K."""
        question = Question(self.weights, self.dtype, chosen_option(self.option), 0)
        if self.way == "prefix":
            question = replace(question, turns=2)
        if self.model == "uneven":
            question = replace(question, k=self.k)
        if not self.together:
            return [(question, self.k)]
        if self.option == "mixed":
            return [
                (replace(question, option=option, number=number), k)
                for number, (option, k) in enumerate(MIXED)
            ]
        return [(replace(question, number=number), self.k) for number in range(CANCELLED)]

    @property
    def cancels(self) -> bool:
        """Whether one more request joins the others and is cancelled."""
        return self.together and self.way in ("batch", "overlapped")

    @property
    def cancelled(self) -> Question:
        """The question of the cancelled request."""
        return Question(self.weights, self.dtype, "plain", CANCELLED)


def chosen_option(option: Option) -> Option:
    """The option of a question: stop strings and log-probabilities choose no other token."""
    match option:
        case "stop" | "last" | "mixed":
            return "plain"
        case "logprobs":
            return "penalised"
        case _:
            return option


def all_cases() -> list[Case]:
    """Every case, in the order of the file."""
    return [
        *_alone(),
        *_overlapped(),
        *_batches(),
        *_stages(),
        *_behind_prefixes(),
        *_resumed(),
        *_options(),
        *_demo(),
        *_deep(),
    ]


def questions_of(cases: list[Case]) -> list[Question]:
    """All questions, each once."""
    questions = [question for case in cases for question, _ in case.questions]
    questions += [case.cancelled for case in cases if case.cancels]
    return sorted(set(questions), key=str)


def _alone() -> Iterator[Case]:
    for dtype in DTYPES:
        for model in DRAFTING:
            yield from (Case("alone", model, dtype, k) for k in range(4))
        yield Case("alone", "window", dtype)
    yield from (Case("alone", "experts", k=k) for k in range(4))
    yield from (Case("alone", "kernels", k=k) for k in range(4))
    yield from (Case("alone", "uneven", k=k) for k in range(4))


def _overlapped() -> Iterator[Case]:
    for k in (1, 2, 3):
        for model in ("full", "hybrid", "latent"):
            yield from (Case("overlapped", model, dtype, k) for dtype in DTYPES)
        yield Case("overlapped", "kernels", k=k)
        yield Case("overlapped", "experts", k=k)
    yield from (Case("overlapped", "hybrid", k=k, together=True) for k in (0, 2))
    yield Case("overlapped", "full", k=0, together=True)
    yield Case("overlapped", "kernels", k=3, together=True)


def _batches() -> Iterator[Case]:
    for model in CACHES:
        for k in (0, 2) if model != "window" else (0,):
            yield from (Case("batch", model, dtype, k, together=True) for dtype in DTYPES)
    for model in DRAFTING:
        yield from (Case("batch", model, k=k, together=True) for k in (1, 3))
    for k in (2, 3):
        yield Case("batch", "kernels", k=k, together=True)
    yield Case("batch", "experts", k=2, together=True)
    for model in ("full", "hybrid", "latent"):
        yield Case("batch", model, k=3, option="mixed", together=True)


def _stages() -> Iterator[Case]:
    for model in CACHES:
        for dtype in DTYPES:
            yield from (Case("stages", model, dtype, stages=stages) for stages in (2, 3))
            yield Case("stages", model, dtype, together=True, stages=2)
    yield Case("stages", "hybrid", together=True, stages=3)
    yield Case("stages", "latent", together=True, stages=3)
    yield Case("stages", "experts", stages=2)
    yield Case("stages", "uneven", stages=2)


def _behind_prefixes() -> Iterator[Case]:
    for model in DRAFTING:
        yield from (Case("prefix", model, k=k) for k in range(4))
        yield from (Case("prefix", model, "bfloat16", k) for k in (0, 2))
    yield from (Case("prefix", "window", dtype) for dtype in DTYPES)
    yield from (Case("prefix", "uneven", k=k) for k in (0, 2))
    yield from (Case("prefix", model, stages=2) for model in (*CACHES, "uneven"))


def _resumed() -> Iterator[Case]:
    for model in ("hybrid", "uneven"):
        for k in range(4):
            yield from (Case("resumed", model, k=k, cut=cut) for cut in CUTS)
    for model in ("full", "latent", "quantised"):
        yield from (Case("resumed", model, k=k, cut="middle") for k in range(4))
    for model in DRAFTING:
        yield from (Case("resumed", model, "bfloat16", k, cut="middle") for k in (0, 2))
    yield from (Case("resumed", "window", dtype, cut="middle") for dtype in DTYPES)
    for model in (*CACHES, "uneven"):
        yield Case("resumed", model, stages=2, cut="middle")
    yield Case("resumed", "hybrid", stages=3, cut="last")
    for k in (0, 2):
        yield Case("resumed", "hybrid", k=k, together=True, cut="middle")
    yield Case("resumed", "hybrid", together=True, stages=2, cut="middle")


def _options() -> Iterator[Case]:
    for option in ("logprobs", "stop", "seeded", "penalised", "grammar", "barred"):
        for model in ("full", "hybrid"):
            yield from (Case("alone", model, k=k, option=option) for k in range(4))
        if option != "grammar":
            yield from (Case("alone", "hybrid", "bfloat16", k, option=option) for k in (0, 2))
        yield Case("batch", "hybrid", k=2, option=option, together=True)
        yield Case("stages", "hybrid", option=option, stages=2)
        yield Case("resumed", "hybrid", k=2, option=option, cut="middle")
    yield from (Case("alone", "hybrid", k=k, option="last") for k in (0, 2))
    for k in (0, 3):
        yield from (Case("resumed", "hybrid", k=k, option="barred", cut=cut) for cut in CUTS)
    # Log-probabilities of uneven numbers show every forward that is not that of before.
    yield from (Case("resumed", "uneven", k=k, option="logprobs", cut="middle") for k in (0, 2))
    yield Case("resumed", "uneven", option="logprobs", stages=2, cut="middle")
    yield Case("prefix", "uneven", k=2, option="logprobs")
    yield Case("prefix", "hybrid", k=3, option="seeded")


def _demo() -> Iterator[Case]:
    yield from (Case("alone", "demo", k=k) for k in range(4))
    yield from (Case("overlapped", "demo", k=k) for k in (2, 3))
    yield Case("batch", "demo", k=3, together=True)
    yield Case("stages", "demo", stages=2)
    yield from (Case("prefix", "demo", k=k) for k in (0, 3))
    yield Case("resumed", "demo", k=3, cut="middle")
    yield Case("alone", "demo", k=2, option="grammar")


def _deep() -> Iterator[Case]:
    """Rounds of four to MOST drafts, on the demo: most are accepted there."""
    yield from (Case("alone", "demo", k=k) for k in range(4, MOST + 1))
    yield from (Case("overlapped", "demo", k=k) for k in (5, MOST))
    yield from (Case("batch", "demo", k=k, together=True) for k in (4, MOST))
    yield Case("prefix", "demo", k=5)
    yield from (Case("resumed", "demo", k=6, cut=cut) for cut in CUTS)
    yield from (Case("alone", "demo", k=k, option="seeded") for k in (0, 4, 5, 6, MOST))
    yield Case("batch", "demo", k=MOST, option="seeded", together=True)
    yield from (Case("alone", "demo", k=k, option="stop") for k in (5, MOST))
    yield from (Case("alone", "demo", k=k, option="last") for k in (4, 6))
    yield Case("alone", "demo", k=MOST, option="grammar")
    for model in ("full", "hybrid", "latent"):
        yield Case("alone", model, k=MOST)
    yield Case("overlapped", "kernels", k=MOST)
    yield Case("batch", "hybrid", k=5, together=True)
