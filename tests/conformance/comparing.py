"""Compares what today's code answers with what was recorded, and with plain decoding."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Final

from cases import Case, Dtype, Question
from driving import TOP, Driver
from engines import Answer
from recorded import Corpus, RecordedAnswer, canonical, names_of, trace

CLOSE: Final[dict[Dtype, float]] = {"float32": 1e-4, "bfloat16": 0.1}
"""Between log-probabilities of two ways to compute the same."""


class Comparison:
    """The answers of one process against a corpus."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._driver = Driver(corpus.seed)

    def differences(self, case: Case) -> list[str]:
        """Each begins with the name of an answer; none if all is as recorded."""
        answers = self._driver.answers(case)
        named = zip(names_of(case), case.questions, answers, strict=True)
        return [
            f"{name}: {what}"
            for name, (question, _), answer in named
            for what in self._of_answer(name, question, answer, case)
        ]

    def _of_answer(
        self, name: str, question: Question, answer: Answer, case: Case
    ) -> Iterator[str]:
        expected = self._corpus.answers.get(name)
        if expected is None:
            yield "it is not recorded"
            return
        inside = slice(expected.start, expected.start + expected.count)
        plain = self._driver.plain(question).ids[inside]
        yield from _ids("as plain decoding gives here", answer.ids, plain)
        recorded = self._corpus.questions[str(question)].ids[inside]
        yield from _ids("as was recorded", answer.ids, recorded)
        yield from _fields(answer, expected)
        if (rounds := self._corpus.traces.get(name)) is not None:
            yield from _rounds(trace(answer), rounds)
        if case.option == "logprobs":
            yield from self._scores(question, answer, expected.start)

    def _scores(self, question: Question, answer: Answer, start: int) -> Iterator[str]:
        plain = self._driver.plain(question, TOP)
        entries, expected = (
            [e for r in each.rounds for e in r.logprobs] for each in (answer, plain)
        )
        if len(entries) != len(answer.ids):
            yield f"{len(entries)} log-probabilities of {len(answer.ids)} tokens"
            return
        for number, (got, other) in enumerate(zip(entries, expected[start:], strict=False)):
            if abs(got.logprob - other.logprob) > CLOSE[question.dtype]:
                yield (
                    f"token {number} has the log-probability {got.logprob:.6f}, but "
                    f"{other.logprob:.6f} in plain decoding"
                )
                return


def _ids(what: str, got: Sequence[int], expected: Sequence[int]) -> Iterator[str]:
    for number, (a, b) in enumerate(zip(got, expected, strict=False)):
        if a != b:
            yield f"token {number} is {a}, but {b} {what}: {_around(got, expected, number)}"
            return
    if len(got) != len(expected):
        yield f"{len(got)} tokens, but {len(expected)} {what}"


def _around(got: Sequence[int], expected: Sequence[int], number: int) -> str:
    some = slice(max(0, number - 2), number + 4)
    return f"got {list(got[some])} from token {some.start} on, expected {list(expected[some])}"


def _fields(answer: Answer, expected: RecordedAnswer) -> Iterator[str]:
    got = RecordedAnswer.of(answer)
    wrong = {name for name, value in asdict(got).items() if value != asdict(expected)[name]}
    for name in sorted(wrong - {"digest", "head"}):
        yield f"{name} is {getattr(got, name)}, but {getattr(expected, name)} was recorded"
    if "digest" in wrong:
        yield f"the digest differs; what it covers is now {canonical(answer)}"


def _rounds(got: Sequence[object], expected: Sequence[object]) -> Iterator[str]:
    for number, (a, b) in enumerate(zip(got, expected, strict=False)):
        if a != b:
            what = "(tokens, drafts, accepted, position)"
            yield f"round {number} is {a} {what}, but {b} was recorded"
            return
    if len(got) != len(expected):
        yield f"{len(got)} rounds, but {len(expected)} were recorded"
