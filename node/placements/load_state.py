"""Where a placement is between its load and its end: a closed union of states, with one writer.

Loading --> Ready --> Restoring --> Ready
   |                      |
   +------> Failed <------+
"""

from dataclasses import dataclass, replace
from typing import Literal, assert_never

Status = Literal["loading", "ready", "restoring", "failed"]


@dataclass(frozen=True, slots=True)
class Loading:
    step: str = ""
    """For a person: what the load does now."""


@dataclass(frozen=True, slots=True)
class Ready:
    """It answers."""


@dataclass(frozen=True, slots=True)
class Restoring:
    """It lost a stage, which is put back; answers wait."""

    why: str
    step: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    why: str


LoadState = Loading | Ready | Restoring | Failed


class Load:
    """The writer: each change says what happened, and one that cannot happen is a defect."""

    def __init__(self, state: LoadState | None = None) -> None:
        """`state`: of a placement that another head loaded."""
        self._state: LoadState = Loading() if state is None else state

    @property
    def state(self) -> LoadState:
        return self._state

    @property
    def status(self) -> Status:
        match self._state:
            case Loading():
                return "loading"
            case Ready():
                return "ready"
            case Restoring():
                return "restoring"
            case Failed():
                return "failed"
            case _:
                assert_never(self._state)

    @property
    def error(self) -> str:
        """Why it is not ready, as far as something is wrong; else ""."""
        match self._state:
            case Restoring(why) | Failed(why):
                return why
            case Loading() | Ready():
                return ""
            case _:
                assert_never(self._state)

    @property
    def step(self) -> str:
        """What is being done, for a person; "" where nothing is."""
        match self._state:
            case Loading(step) | Restoring(_, step):
                return step
            case _:
                return ""

    def advance(self, step: str) -> None:
        """A runner says what its load does. One that failed meanwhile stays failed."""
        if isinstance(self._state, Loading | Restoring):
            self._state = replace(self._state, step=step)

    def ready(self) -> None:
        """Every stage is loaded and connected, for the first time or again."""
        assert isinstance(self._state, Loading | Restoring), self._state
        self._state = Ready()

    def lose(self, why: str) -> None:
        """A stage is gone: a load has failed, and what was ready is being restored."""
        match self._state:
            case Loading():
                self._state = Failed(why)
            case Ready() | Restoring():  # a restore that was cancelled begins anew
                self._state = Restoring(why)
            case Failed():
                raise AssertionError("a placement that failed holds nothing that can be lost")
            case _:
                assert_never(self._state)

    def fail(self, why: str) -> None:
        """It cannot be loaded, or restored."""
        self._state = Failed(why)
