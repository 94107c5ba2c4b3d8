"""Greedy ids are mlx-lm's in every family, layout and precision, whatever drafts (a sample)."""

from pathlib import Path

import pytest
from identity import TOKENS, Case, Subjects, all_cases, pairs_of, pairwise

ALL = list(all_cases())
SAMPLE = pairwise(ALL)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    return Subjects(Path(tmp_path_factory.mktemp("matrix")))


def test_any_two_values_that_can_meet_do() -> None:
    expected = set[object]().union(*map(pairs_of, ALL))
    assert set[object]().union(*map(pairs_of, SAMPLE)) == expected
    assert len(SAMPLE) < len(ALL) / 20
    assert len(set(SAMPLE)) == len(SAMPLE)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_the_ids_are_those_of_generate_step(subjects: Subjects, case: Case) -> None:
    subject = subjects.of(case)
    ids, rounds = subject.answer(case)
    assert ids == subject.reference(case.length)
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    if case.k and case.kind != "head":
        assert accepted == (drafted if case.kind == "perfect" else 0)
    if case.k:
        assert drafted > 0
    assert sum(len(r.tokens) for r in rounds) == TOKENS
