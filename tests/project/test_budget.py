"""The size of the product stays within `budget.toml`; each limit is close to the count.

A change that needs more edits that file, and says there what it bought.
"""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from counts import RequestPath, fields_of, lines_by_room

BUDGET: dict[str, Any] = tomllib.loads((Path(__file__).parent / "budget.toml").read_text())
SLACK = 60
"""Lines by which a limit may exceed the count: a removal is recorded, not spent by the next one."""
HOW = "see tests/project/budget.toml: merge or remove something, or raise the limit with a reason"


def test_each_room_has_a_limit_and_keeps_it() -> None:
    counts, limits = lines_by_room(), BUDGET["lines"]
    assert set(counts) == set(limits), HOW
    over = {room: (count, limits[room]) for room, count in counts.items() if count > limits[room]}
    assert not over, HOW
    loose = {
        room: (counts[room], limit)
        for room, limit in limits.items()
        if limit > counts[room] + SLACK
    }
    assert not loose, f"lower these limits to what is left: {loose}"


def test_a_request_passes_no_more_files_and_lines_than_its_limit() -> None:
    limit = BUDGET["request_path"]
    files, lines = RequestPath(limit["entries"]).count()
    assert files <= limit["files"] and lines <= limit["lines"], f"{files}, {lines}: {HOW}"
    assert lines + 5 * SLACK >= limit["lines"], f"lower the limit: {files} files, {lines} lines"


@pytest.mark.parametrize("form", BUDGET["fields"])
def test_the_forms_of_a_request_have_no_more_fields_than_their_limit(form: str) -> None:
    assert fields_of(form) == BUDGET["fields"][form], HOW


def test_each_reason_says_what_was_bought() -> None:
    assert all(reason["bought"] and reason["lines"] for reason in BUDGET["reasons"])


def test_code_that_nothing_names_is_not_on_the_path(tmp_path: Path) -> None:
    """The count sees a call, an attribute of an imported class, and a protocol's class; no more."""
    files = {
        "a.py": "from .b import Thing\nfrom .c import Seam\n\n"
        "def enter(thing: Thing, seam: Seam):\n    thing.used()\n    seam.ask()\n",
        "b.py": "class Thing:\n    def used(self):\n        return 1\n\n    def unused(self):\n"
        "        return 2\n",
        "c.py": "from typing import Protocol\n\nclass Seam(Protocol):\n    def ask(self): ...\n",
        "d.py": "class Real:\n    def ask(self):\n        return 3\n",
        "e.py": "def nobody():\n    return 4\n",
    }
    (tmp_path / "mtp").mkdir()
    for name, text in files.items():
        (tmp_path / "mtp" / name).write_text(text)
    path = RequestPath(["mtp/a.py:enter"], root=tmp_path)
    assert path.count() == (4, 3 + 2 + 2 + 2)
