"""Which of several requests is copied to the spare next: the one that has waited longest."""

from dataclasses import dataclass


@dataclass(slots=True)
class _Asker:
    asked: int = 0
    """The number of its last question."""
    had: int = 0
    """The number of the question at which it last had a turn; 0: none yet."""


class CopyTurns:
    """Requests ask round by round; one that stopped asking holds nobody up."""

    def __init__(self) -> None:
        self._askers: dict[str, _Asker] = {}
        self._questions = 0

    def ask(self, request: str, *, free: bool) -> bool:
        """Whether it is the request's turn; `free`: whether a copy may be made at all.

        The turn is taken by that. Of those that asked since this request did last, one whose
        last turn is longer ago goes first.
        """
        self._questions += 1
        mine = self._askers.setdefault(request, _Asker())
        before, mine.asked = mine.asked, self._questions
        if not free:
            return False
        for name, other in self._askers.items():
            if name != request and other.asked > before and other.had < mine.had:
                return False
        mine.had = self._questions
        return True

    def forget(self, request: str) -> None:
        """The request is over, or is never copied."""
        _ = self._askers.pop(request, None)

    def clear(self) -> None:
        self._askers.clear()
