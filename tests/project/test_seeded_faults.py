"""Every seeded fault fits the code, so that a change of the code includes its faults."""

import ast
from pathlib import Path

import pytest
from seeded_faults import PROJECT, Fault, load

FAULTS = load()


def test_there_are_enough_faults_and_each_has_its_own_name() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) >= 120
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("file", sorted({fault.file for fault in FAULTS}))
def test_the_text_of_each_fault_of_a_file_occurs_once(file: str) -> None:
    for fault in (each for each in FAULTS if each.file == file):
        _ = fault.lines()
        changed = (PROJECT / file).read_text().replace(fault.before, fault.after)
        assert fault.before != fault.after, fault.name
        if file.endswith(".py"):
            _ = ast.parse(changed)


def test_a_fault_whose_text_is_gone_is_named(tmp_path: Path) -> None:
    fault = Fault("lost", "code.py", "a = 1\n", "a = 2\n", "a is wrong")
    (tmp_path / "code.py").write_text("a = 3\n")
    with pytest.raises(ValueError, match=r"fault lost: its text occurs 0 times in code\.py"):
        fault.apply(tmp_path)
