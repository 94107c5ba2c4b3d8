"""The files of the corpus: what each question and each answer was when it was recorded."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, cast

from cases import Case, Question
from engines import Answer

FOLDER: Final = Path(__file__).parent
ANSWERS: Final = FOLDER / "answers.json"
TRACES: Final = FOLDER / "traces.json"
HEAD: Final = 8
DIGITS: Final = 16

OF_A_CLOCK: Final = ("prompt_tps", "generation_tps", "time_to_first_token_s", "read_s")
OF_A_MACHINE: Final = ("peak_memory_bytes", "kernels")
SINCE_ADDED: Final = (
    "cached_tier",
    "depth_reason",
    "lookup_rounds",
    "lookup_proposed_tokens",
    "lookup_accepted_tokens",
    "lookup_reason",
    "loop_reason",
    "read_by",
    "read_bytes",
    "read_reason",
)
"""Statistics that the recorded answers did not have yet. None of them copies drafts: a copy follows
from measured costs."""
OF_A_SCHEDULE: Final = ("batched_tokens", "batch_size")
"""Statistics that also depend on whose turn it is; they are recorded beside the digest."""

TRACED: Final = (
    Case("alone", "hybrid", k=3),
    Case("alone", "latent", k=2),
    Case("overlapped", "kernels", k=3),
    Case("prefix", "full", k=3),
    Case("resumed", "hybrid", k=2, cut="middle"),
    Case("stages", "window", stages=2),
    Case("alone", "hybrid", k=2, option="grammar"),
    Case("batch", "hybrid", k=3, option="mixed", together=True),
)
"""Cases of which every round is recorded."""


@dataclass(frozen=True, slots=True)
class RecordedQuestion:
    """The ids of plain decoding. `gap`: the smallest between the two best log-probabilities."""

    seed: int
    gap: float | None
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One answer in short. `start`: tokens of its question that an earlier attempt gave.

    `digest` covers ids, text, the rounds' positions, the end and all statistics but those named
    above; `shared` has the tokens of shared forwards and the mean number of requests in a forward.
    """

    count: int
    head: tuple[int, ...]
    reason: str
    rounds: int
    digest: str
    start: int = 0
    drafted: int = 0
    accepted: int = 0
    cached: int = 0
    shared: tuple[int, float] = (0, 1.0)

    @classmethod
    def of(cls, answer: Answer) -> "RecordedAnswer":
        stats = answer.stats
        return cls(
            start=stats.completion_tokens - len(answer.ids),
            count=len(answer.ids),
            head=answer.ids[:HEAD],
            reason=answer.end.reason,
            rounds=len(answer.rounds),
            drafted=stats.proposed_draft_tokens,
            accepted=stats.accepted_draft_tokens,
            cached=stats.cached_tokens,
            shared=(stats.batched_tokens, round(stats.batch_size, 4)),
            digest=hashlib.sha256(canonical(answer).encode()).hexdigest()[:DIGITS],
        )


Trace = list[list[Any]]
"""Each round's entry: its tokens, drafts, accepted drafts, the rows before it."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """All that is recorded, by name."""

    questions: Mapping[str, RecordedQuestion]
    answers: Mapping[str, RecordedAnswer]
    traces: Mapping[str, Trace]

    def seed(self, question: Question) -> int:
        return self.questions[str(question)].seed

    @classmethod
    def read(cls) -> "Corpus":
        texts = json.loads(ANSWERS.read_text())
        return cls(
            {name: RecordedQuestion(**_values(row)) for name, row in texts["questions"].items()},
            {name: RecordedAnswer(**_values(row)) for name, row in texts["answers"].items()},
            json.loads(TRACES.read_text()),
        )

    def write(self) -> None:
        """One line for each entry, so that a difference shows what changed."""
        questions = {name: asdict(row) for name, row in self.questions.items()}
        answers = {name: _short(row) for name, row in self.answers.items()}
        _ = ANSWERS.write_text(_lines({"answers": _lines(answers), "questions": _lines(questions)}))
        _ = TRACES.write_text(_lines(self.traces))


def names_of(case: Case) -> list[str]:
    """The names of the case's answers."""
    count = len(case.questions)
    return [str(case)] if count == 1 else [f"{case}#{number}" for number in range(count)]


def canonical(answer: Answer) -> str:
    """All of an answer that depends on no clock, machine or schedule, as JSON."""
    stats = asdict(answer.stats)
    assert not stats["lookup_rounds"], "no case of the corpus copies drafts"
    for name in (*OF_A_CLOCK, *OF_A_MACHINE, *SINCE_ADDED, *OF_A_SCHEDULE):
        del stats[name]
    record = {
        "ids": answer.ids,
        "text": answer.text,
        "reason": answer.end.reason,
        "stopped_by": answer.end.stopped_by,
        "positions": [each.forward.position for each in answer.rounds],
        "scored": [entry.token for each in answer.rounds for entry in each.logprobs],
        "stats": stats,
    }
    return json.dumps(record, sort_keys=True)


def trace(answer: Answer) -> Trace:
    """The rounds of an answer."""
    return [
        [list(each.tokens), each.drafted, each.accepted, each.forward.position]
        for each in answer.rounds
    ]


def _short(row: RecordedAnswer) -> dict[str, Any]:
    """The values that are no defaults."""
    usual = {field.name: field.default for field in fields(row)}
    return {name: value for name, value in asdict(row).items() if usual[name] != value}


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's lists as tuples."""
    return {
        name: tuple(cast("list[Any]", value)) if isinstance(value, list) else value
        for name, value in row.items()
    }


def _lines(rows: Mapping[str, Any]) -> str:
    """A JSON object with one line for each entry; strings are JSON already."""
    texts = {name: row if isinstance(row, str) else _compact(row) for name, row in rows.items()}
    entries = (f"{json.dumps(name)}: {text.rstrip()}" for name, text in sorted(texts.items()))
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _compact(row: Any) -> str:
    return json.dumps(row, sort_keys=True, separators=(",", ":"))
