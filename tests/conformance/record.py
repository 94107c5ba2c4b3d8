"""Writes what the conformance corpus expects, anew.

    python tests/conformance/record.py               # the same prompts: answers and traces
    python tests/conformance/record.py --choose      # prompts that are missing, too
    python tests/conformance/record.py --choose all  # all prompts anew

Only by intention: the corpus says how the engine behaved before it was redesigned, so each line
that changes needs a reason, which belongs into the commit's message. It refuses to write an answer
whose ids are not those of plain decoding. Run it from the project's folder, with `.links` in
PYTHONPATH where the package is not installed.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))

import as_runners  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import fused_headers
from cases import Question, all_cases, questions_of
from driving import Driver
from margins import choose
from recorded import (
    ANSWERS,
    TRACED,
    Corpus,
    RecordedAnswer,
    RecordedQuestion,
    Trace,
    names_of,
    trace,
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Records the conformance corpus")
    which = ("missing", "all")
    _ = parser.add_argument("--choose", nargs="?", const="missing", choices=which)
    options = parser.parse_args()
    fused_headers.use()
    before = Corpus.read() if ANSWERS.exists() else Corpus({}, {}, {})
    questions = dict[str, RecordedQuestion]()
    for question in questions_of(all_cases()):
        recorded = None if options.choose == "all" else before.questions.get(str(question))
        questions[str(question)] = _question(question, recorded, may_choose=bool(options.choose))
    answers, traces = _answers(questions)
    Corpus(questions, answers, traces).write()
    changed = [name for name, row in answers.items() if before.answers.get(name) != row]
    print(f"{len(questions)} questions, {len(answers)} answers, {len(changed)} of them changed")
    return 0


def _question(
    question: Question, recorded: RecordedQuestion | None, *, may_choose: bool
) -> RecordedQuestion:
    """The question as it is answered now."""
    if recorded is None:
        assert may_choose, f"no prompt is known for: {question}; choose one with --choose"
        start = time.process_time()
        choice = choose(question)
        seed, gap = choice.seed, choice.gap
        spent = time.process_time() - start
        print(f"{question}: seed {seed}, gap {gap}, {spent:.1f} s", flush=True)
    else:
        seed, gap = recorded.seed, recorded.gap
    return RecordedQuestion(seed, gap, Driver(lambda _: seed).plain(question).ids)


def _answers(
    questions: dict[str, RecordedQuestion],
) -> tuple[dict[str, RecordedAnswer], dict[str, Trace]]:
    answers, traces = dict[str, RecordedAnswer](), dict[str, Trace]()
    driver = Driver(lambda question: questions[str(question)].seed)
    for case in all_cases():
        answer_rows = zip(names_of(case), case.questions, driver.answers(case), strict=True)
        for name, (question, _), answer in answer_rows:
            row = answers[name] = RecordedAnswer.of(answer)
            plain = questions[str(question)].ids[row.start : row.start + row.count]
            assert answer.ids == plain, f"{name} is not what plain decoding gives"
            if case in TRACED:
                traces[name] = trace(answer)
    return answers, traces


if __name__ == "__main__":
    sys.exit(main())
