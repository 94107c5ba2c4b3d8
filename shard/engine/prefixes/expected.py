"""The states that another runner may send for a prompt; all others are refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .prompt_path import DRAFTS

SPARE_ROWS: Final = 1 << 13
"""Rows beyond the context that a cache may have room for, as it grows by whole steps."""


@dataclass(frozen=True, slots=True)
class ExpectedPrefix:
    """The prefixes of one prompt that are worth a transfer."""

    key: str
    """See `persistent_files.shared_prefix_key`."""
    stems: Mapping[int, str]
    """The names of the prompt's states, by their rows."""
    beyond: int
    """Rows of the prefix that is cached here."""
    drafts: bool
    """Whether a draft state is needed."""
    context_length: int

    def check(self, description: Mapping[str, Any]) -> None:
        """Raises ValueError, or a parser's error, unless a file's description is one of them."""
        if description["key"] != self.key:
            raise ValueError("it is of another model, or of another kind of machine")
        rows, name = description["rows"], description["name"]
        stem = self.stems.get(rows)
        if stem is None or name not in ((stem + DRAFTS,) if self.drafts else (stem + DRAFTS, stem)):
            raise ValueError("it is of another prompt")
        if (description["head"] is not None) != name.endswith(DRAFTS):
            raise ValueError("it has another draft state than its name says")
        if (description["begin"], description["parent"]) != (0, None):
            raise ValueError("its first rows are missing")
        if rows <= self.beyond:
            raise ValueError(f"its {rows} rows are no more than the {self.beyond} that are here")
        counts = [rows, description["first_turn"]]
        spans = list(description["spans"])
        if (head := description["head"]) is not None:
            counts.append(head["rows"])
            spans += head["spans"]
        if not all(type(count) is int and 0 <= count <= rows for count in counts):
            raise ValueError("its counts of rows do not fit")
        self._check_room(spans)

    def _check_room(self, spans: Sequence[Sequence[Mapping[str, Any] | None]]) -> None:
        rooms = [part["room"] for span in spans for part in span if part is not None]
        if not all(
            type(room) is int and 0 <= room <= self.context_length + SPARE_ROWS for room in rooms
        ):
            raise ValueError("its caches have more room than the context")
