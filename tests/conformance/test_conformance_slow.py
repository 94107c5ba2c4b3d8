"""The cases of the corpus that `test_conformance.py` leaves out."""

import pytest
from cases import Case, all_cases
from comparing import Comparison
from recorded import Corpus


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return Comparison(Corpus.read())


@pytest.mark.parametrize("case", [case for case in all_cases() if not case.is_quick], ids=str)
def test_an_answer_is_the_recorded_one_and_that_of_plain_decoding(
    case: Case, comparison: Comparison
) -> None:
    differences = comparison.differences(case)
    assert not differences, "\n".join(differences)
