"""Chooses between drafters of one model by their expected speeds. Pure."""

from collections.abc import Mapping
from typing import Final

from ..types import DrafterKind

HYSTERESIS: Final = 1.05
"""Ratio by which another drafter must be faster before it replaces the present one."""
TRIAL_EVERY: Final = 32
"""Answers between those that show again how often the slower drafter's drafts are accepted. Within
such an answer K is chosen as ever, so that it is not slower than plain decoding for long."""

_OTHER: Final[Mapping[DrafterKind, DrafterKind]] = {
    "native_mtp": "block_drafter",
    "block_drafter": "native_mtp",
}
WORDS: Final[Mapping[DrafterKind, str]] = {
    "native_mtp": "native MTP",
    "block_drafter": "the block drafter",
}


class DrafterComparison:
    """The drafter of the next answer, and why."""

    def __init__(self, kind: DrafterKind, reason: str = "") -> None:
        """`kind`: the one that begins."""
        self.kind: DrafterKind = kind
        self.reason = reason
        """Why it is this one, for a person; empty before the first choice."""
        self._answers = 0

    def choose(self, speeds: Mapping[DrafterKind, float]) -> None:
        """Sets the drafter of the next answer. `speeds`: relative to plain decoding, 0 if unknown.

        One whose speed is unknown drafts until it is known, the present one first.
        """
        own, other, self._answers = self.kind, _OTHER[self.kind], self._answers + 1
        if not speeds[own] or not speeds[other]:
            self.kind = other if speeds[own] else own
            self.reason = f"{WORDS[self.kind]} drafts, until its speed is known"
            return
        is_trial = self._answers % TRIAL_EVERY == 0
        if is_trial or speeds[other] > HYSTERESIS * speeds[own]:
            self.kind = other
        listed = ", ".join(f"{WORDS[kind]} {speed:.2f}" for kind, speed in speeds.items())
        verb = "is tried again" if is_trial else "drafts"
        self.reason = f"{WORDS[self.kind]} {verb}; times plain decoding: {listed}"
