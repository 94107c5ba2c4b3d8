"""Seeded faults: small bugs, as replacements of text, that the tests must notice.

The TOML files beside this module hold them. They were written from the product's code alone,
without the tests. `run.py` applies one after the other and reports which test noticed it.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PROJECT = FOLDER.parents[1]


@dataclass(frozen=True, slots=True)
class Fault:
    """One bug: the text `before`, which occurs once in `file`, becomes `after`."""

    name: str
    file: str
    before: str
    after: str
    effect: str

    def lines(self, project: Path = PROJECT) -> range:
        """The lines of the file that the fault changes, counted from 1.

        ValueError if `before` does not occur exactly once.
        """
        text = (project / self.file).read_text()
        if text.count(self.before) != 1:
            raise ValueError(
                f"fault {self.name}: its text occurs {text.count(self.before)} times in"
                f" {self.file} and must occur once; change the fault with the code, or replace it"
            )
        first = text[: text.index(self.before)].count("\n") + 1
        return range(first, first + max(1, self.before.count("\n")))

    def apply(self, project: Path) -> None:
        """Changes the file in this copy of the project."""
        self.lines(project)
        path = project / self.file
        _ = path.write_text(path.read_text().replace(self.before, self.after))

    def revert(self, project: Path) -> None:
        """Writes the file as it is in the project that the copy was made of."""
        _ = (project / self.file).write_text((PROJECT / self.file).read_text())


def load() -> list[Fault]:
    """All faults, by file of faults and then in its order."""
    return [
        Fault(**fields)
        for file in sorted(FOLDER.glob("*.toml"))
        for fields in tomllib.loads(file.read_text())["fault"]
    ]
