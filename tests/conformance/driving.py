"""Ways to have questions answered: all that the corpus uses of the product.

A change of the engine's entry points changes this module and `subjects.py` alone. All here goes
through `TextEngine`, `Parameters` and the events; over stages, through `pipelines.Pipeline`.
Rounds that overlap are a choice of the engine on CUDA; `runs_ahead` makes the same choice on a CPU.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cases import (
    CANCELLED,
    CANCELLED_AT,
    FIRST_TURN,
    STEPS,
    Case,
    Cut,
    Option,
    Question,
)
from engines import Answer, answer, engine_of, request
from pipelines import Pipeline
from readers import Reader, together
from subjects import loaded, room_of, spec_of

from exo_node.mtp.types import Round, Sampling
from exo_node.shard.engine.answers.events import AnswerEnd, Delta
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.options import EngineOptions
from exo_node.shard.engine.request import Parameters
from exo_node.shard.text.grammars.grammar import Gate
from exo_node.shard.text.grammars.grammars import GrammarSpec

Seeds = Callable[[Question], int]
"""The seed of a question's prompt."""

SEEDED: Final = Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=11)
PENALISED: Final = Sampling(
    repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1, logit_bias=((7, 2.0),)
)
PATTERN: Final = r'\{"colour":"(red|green|blue)","words":"[a-z]{4,9}( [a-z]{2,9}){1,3}"\}'
TOP: Final = 2
LEAST: Final = 11


@dataclass(slots=True)
class _Listener(Reader):
    """A request that is stepped beside others, with the text that it was given."""

    text: str = ""

    def take(self, event: object) -> None:
        Reader.take(self, event)
        if isinstance(event, Delta | AnswerEnd):
            self.text += event.text

    @property
    def answer(self) -> Answer:
        assert self.fault is None and self.end is not None
        return Answer(tuple(self.ids), self.text, tuple(self.rounds), self.end)


class Driver:
    """Answers cases. `seeds` picks the prompts."""

    def __init__(self, seeds: Seeds) -> None:
        self._seeds = seeds
        self._plain: dict[tuple[Question, int, int | None], Answer] = {}

    def answers(self, case: Case) -> list[Answer]:
        """The answers to the case's questions, in order."""
        served = self._engine(case)
        if case.way == "prefix":
            question, _ = case.questions[0]
            first = self._prompt(question)[:FIRST_TURN]
            _ = answer(served, request(first, case.k, 6, ignore_eos=True))
        engine_requests = [self._of_case(served, case, *each) for each in case.questions]
        if case.together:
            return self._together(served, case, engine_requests)
        return [answer(served, each) for each in engine_requests]

    def plain(self, question: Question, top_logprobs: int | None = None) -> Answer:
        """The answer that decides the question's ids: of one request, with nothing before it."""
        return self.alone(question, question.k, top_logprobs)

    def alone(self, question: Question, k: int, top_logprobs: int | None = None) -> Answer:
        """The answer of one request at a time, whose rounds wait for each other."""
        key = question, k, top_logprobs
        if key not in self._plain:
            served = whole_engine(reference(question))
            engine_request = self.request(served, question, k, top_logprobs=top_logprobs)
            self._plain[key] = answer(served, engine_request)
        return self._plain[key]

    def request(self, served: TextEngine, question: Question, k: int, **fields: Any) -> Parameters:
        """The question as a request to this engine. `fields`: other fields of the request."""
        return self._engine_request(question, k, **_fields(question.option, served), **fields)

    def _engine(self, case: Case) -> TextEngine:
        return whole_engine(case) if case.stages == 1 else staged_engine(case)

    def _of_case(self, served: TextEngine, case: Case, question: Question, k: int) -> Parameters:
        fields = dict[str, Any]()
        if case.option == "logprobs":
            fields["top_logprobs"] = TOP
        if case.option == "stop":
            fields["stop"] = (_middle(self.plain(question).text),)
        if case.option == "last":
            fields["stop"] = (_end(self.plain(question).text),)
        if case.cut is not None:
            fields |= {"attempt": 2, "replay": self._log(question, k, case.cut)}
        return self.request(served, question, k, **fields)

    def _engine_request(self, question: Question, k: int, **fields: Any) -> Parameters:
        ends = question.model == "demo" or question.option in ("grammar", "barred")
        fields = {"drafting_reason": "" if k else "a test", "ignore_eos": not ends} | fields
        return request(self._prompt(question), k, question.tokens, **fields)

    def _prompt(self, question: Question) -> list[int]:
        return question.prompt(self._seeds(question))

    def _log(self, question: Question, k: int, cut: Cut) -> Sequence[Round]:
        """The rounds that an earlier attempt gave."""
        rounds = self.alone(question, k).rounds
        return rounds[: {"first": 1, "middle": len(rounds) // 2, "last": len(rounds) - 1}[cut]]

    def _together(
        self, served: TextEngine, case: Case, engine_requests: Sequence[Parameters]
    ) -> list[Answer]:
        readers = [_Listener(each, begins=STEPS[i]) for i, each in enumerate(engine_requests)]
        cancelled = self._cancelled(case)
        together(served, [*readers, *cancelled])
        for reader in cancelled:
            ids, plain = reader.ids, self.plain(case.cancelled).ids
            assert ids, f"{case}: the cancelled request gave nothing"
            expected = list(plain[: len(ids)])
            assert ids == expected, f"{case}: cancelled after {ids}, expected {expected}"
        assert served.live_requests == 0 and served.cache_bytes() == 0
        return [reader.answer for reader in readers]

    def _cancelled(self, case: Case) -> list[Reader]:
        """The request of a batch that is cancelled; none where the way has none."""
        if not case.cancels:
            return []
        engine_request = self._engine_request(case.cancelled, case.k)
        return [Reader(engine_request, begins=STEPS[CANCELLED], ends=CANCELLED_AT)]


def reference(question: Question) -> Case:
    """The way to decode that decides the question's ids."""
    return Case("alone", question.model, question.dtype, question.k)


def whole_engine(case: Case) -> TextEngine:
    """An engine that holds the whole model, as the case's way needs it."""
    (part,) = loaded(case.model, case.dtype)
    stage_spec = spec_of(case.model, case.dtype)
    if case.way == "prefix":
        (stage_spec.prefix_cache_bytes,) = room_of([part])
    # No clock decides who shares a forward.
    text_engine = engine_of(
        part, stage_spec, runs_ahead=case.way == "overlapped", clock=lambda: 0.0
    )
    if case.model != "uneven":
        text_engine.measurements.batch_identity = "bitwise"
        text_engine.measurements.shares_prompts = True
    return text_engine


def staged_engine(case: Case) -> TextEngine:
    """The first stage's engine; the other stages run in this process."""
    parts = loaded(case.model, case.dtype, case.stages)
    rooms = room_of(parts) if case.way == "prefix" else [0] * len(parts)
    options = EngineOptions.of(spec_of(case.model, case.dtype, case.stages))
    return Pipeline(parts, options, rooms=rooms, clock=lambda: 0.0).engine


def _fields(option: Option, served: TextEngine) -> dict[str, Any]:
    """Fields of a request with this option."""
    match option:
        case "seeded":
            return {"sampling": SEEDED}
        case "penalised":
            return {"sampling": PENALISED}
        case "barred":
            end = min(served.codec.end_tokens)
            return {"sampling": Sampling(logit_bias=((end, 50.0),), min_tokens=LEAST)}
        case "grammar":
            grammar = GrammarSpec("regex", PATTERN, "response_format")
            return {"grammar": served.codec.grammars.compile(grammar, Gate())}
        case _:
            return {}


def _middle(text: str) -> str:
    """Some characters of a text that stand there once."""
    half = len(text) // 2
    return _once(text, (text[half : half + size] for size in range(4, half)))


def _end(text: str) -> str:
    """The last characters of a text, which stand there once."""
    return _once(text, (text[-size:] for size in range(2, len(text))))


def _once(text: str, parts: Iterable[str]) -> str:
    return next(part for part in parts if text.count(part) == 1)
