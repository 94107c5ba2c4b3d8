"""The core stays quick: a file that takes too long is named, and the slow files are listed."""

import pytest
from conftest import SLOW_FILES, TESTS
from costs import NAMED_S, REFUSED_S, refused_s, too_dear

SPENT = {"quick": 1.0, "long": NAMED_S + 1, "very long": REFUSED_S + 1, "slow part": 100.0}


def test_core_files_over_the_limit_are_named_the_slowest_first() -> None:
    quick = ["quick", "long", "very long"]
    assert too_dear(SPENT, quick, NAMED_S) == ["very long", "long"]
    assert too_dear(SPENT, quick, REFUSED_S) == ["very long"]


def test_where_all_files_take_twice_as_long_one_may_take_its_share() -> None:
    busy = {f"file {number}": 8.0 for number in range(120)} | {"long": 22.0}
    assert refused_s(SPENT, SPENT) == REFUSED_S < 22.0 < refused_s(busy, busy)
    assert too_dear(busy, busy, refused_s(busy, busy)) == []


@pytest.mark.parametrize("part", SLOW_FILES)
def test_a_slow_file_that_is_listed_exists(part: str) -> None:
    assert [file for file in SLOW_FILES[part] if not (TESTS / f"{file}.py").exists()] == []


def test_files_that_start_nodes_are_in_the_part_of_clusters() -> None:
    files = {f"processes/{path.stem}" for path in (TESTS / "processes").glob("test_*.py")}
    assert files <= set(SLOW_FILES["cluster"])
