"""Every way to decode gives the recorded answers: tiny models in float32, with 0 and 2 drafts.

`cases.py` says what is recorded, and `record.py` records it; the other cases are in
`test_conformance_slow.py`.
"""

from collections import Counter

import pytest
from cases import Case, all_cases, questions_of
from comparing import Comparison
from margins import GAPS
from recorded import ANSWERS, TRACED, Corpus, names_of

CASES = all_cases()
IN_THE_CORE = ("hybrid", "kernels")
"""The models whose quick cases `make test` has: recurrent layers with a draft head, whose state
after a verify is kept as a CPU's and as a GPU's kernels keep it."""


def _quick(case: Case) -> object:
    core = any(f"/{subject}/" in str(case) for subject in IN_THE_CORE)
    return pytest.param(case, marks=[pytest.mark.smoke] if core else [], id=str(case))


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return Comparison(Corpus.read())


@pytest.mark.parametrize("case", [_quick(case) for case in CASES if case.is_quick])
def test_an_answer_is_the_recorded_one_and_that_of_plain_decoding(
    case: Case, comparison: Comparison
) -> None:
    differences = comparison.differences(case)
    assert not differences, "\n".join(differences)


def test_the_files_hold_the_table_and_nothing_else() -> None:
    corpus = Corpus.read()
    names = [name for case in CASES for name in names_of(case)]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert set(corpus.answers) == set(names)
    assert set(corpus.questions) == {str(question) for question in questions_of(CASES)}
    assert set(corpus.traces) == {name for case in TRACED for name in names_of(case)}
    assert ANSWERS.stat().st_size < 150_000


def test_no_recorded_token_is_a_near_tie() -> None:
    corpus = Corpus.read()
    for question in questions_of(CASES):
        gap = corpus.questions[str(question)].gap
        assert (gap is None) == (question.option == "seeded")
        assert gap is None or gap >= GAPS[question.dtype]
