"""The highest term that this node knew, on disk before it is used."""

from pathlib import Path
from typing import Final

from ...placement.errors import InvalidSettings
from ...placement.ids import Term
from ...shard.checkpoint.files import write_atomic
from .election import MAX_TERM

_NAME: Final = "term"
_MAX_DIGITS: Final = 20
"""More than any term has; Python reads no number of thousands of digits."""


class TermFile:
    """`election.TermStore` over a file in the data folder: a number and a line break."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / _NAME

    def load(self) -> Term:
        """0 where there is no file. Raises InvalidSettings for one that holds no term."""
        try:
            text = self._path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return Term(0)
        except (OSError, UnicodeDecodeError) as fault:
            raise self._damaged(str(fault)) from fault
        if not text.isdecimal() or len(text) > _MAX_DIGITS or int(text) > MAX_TERM:
            raise self._damaged(f"it should hold one number, at most {MAX_TERM}")
        return Term(int(text))

    def save(self, term: Term) -> None:
        """Returns when the file and its name are on the disk. Raises OSError where they are not."""
        write_atomic(self._path, f"{term}\n".encode("ascii"), mode=0o644, sync=True)

    def _damaged(self, why: str) -> InvalidSettings:
        return InvalidSettings(
            f"{self._path} is damaged ({why}); stop the cluster's other nodes or keep them "
            "connected, then remove the file: the term is learnt from them anew",
            param="--data-dir",
        )
