"""Executables that stand for coding tools: each records how it was started."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROGRAM = """\
#!{python}
import json, os, sys
record = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid()}}
part = {folder!r} + f"/{name}.{{os.getpid()}}"
with open(part + ".part", "w") as file:
    json.dump(record, file)
os.rename(part + ".part", part + ".json")
{then}
"""


@dataclass(frozen=True, slots=True)
class StandIns:
    """A folder for PATH, and the records that its programs write there."""

    folder: Path

    def add(self, name: str, then: str = "") -> None:
        """A tool that does `then`, in Python, once it has recorded its start."""
        program = self.folder / name
        python, folder = sys.executable, str(self.folder)
        _ = program.write_text(_PROGRAM.format(python=python, folder=folder, name=name, then=then))
        program.chmod(0o755)

    def records(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(each.read_text()) for each in self.folder.glob(f"{name}.*.json")]

    def only(self, name: str) -> dict[str, Any]:
        [record] = self.records(name)
        return record
