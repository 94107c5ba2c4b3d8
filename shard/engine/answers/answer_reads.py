"""Answers that are read again as prompts while nothing else runs: the next turn begins after them.

Decoding wrote an answer's rows one by one, and on most devices they do not have the bits of a
prompt's rows, so they cannot be cached. Read again by the forwards that the next prompt would have,
they can.
"""

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ....mtp.schedule import Schedule
from ....proto.fields import changed
from ..request import Parameters

RECENT: Final = 8
"""Answers that wait at most, and those that a prompt is compared with."""
MAX_UNUSED: Final = 8
"""Answers in a row that no later prompt began with, before no more are read: single questions need
none, and the templates of some models remove the reasoning of earlier turns."""


class AnswerReads:
    """Chooses the answers to read. All methods run on the compute thread."""

    def __init__(self, schedule: Schedule, context_length: int) -> None:
        self._schedule = schedule
        self._context_length = context_length
        self._waiting = deque[tuple[Parameters, int]](maxlen=RECENT)
        self._recent = deque[tuple[bytes, int, bytes]](maxlen=RECENT)
        """Salt, number of ids and digest of each, until a prompt begins with it."""
        self._unused = 0

    def begin(self, request: Parameters) -> None:
        """Notes whether a new prompt begins with a recent answer and its own prompt."""
        for each in reversed(self._recent):
            salt, length, digest = each
            if salt == request.sharing.cache_salt and digest == _digest(request.prompt[:length]):
                self._recent.remove(each)
                self._unused = 0
                return

    def add(self, request: Parameters, answer: Sequence[int]) -> None:
        """Adds an answer that has ended, with the ids of all its rounds."""
        is_cached = request.uses_cache and not request.output.prompt_logprobs
        if not is_cached or not answer or answer[-1] not in self._schedule.turn_ends:
            return
        ids = [*request.prompt, *answer]
        if len(self._recent) == RECENT:
            self._unused += 1
        self._recent.append((request.sharing.cache_salt, len(ids), _digest(ids)))
        prompt = [*ids, ids[-1]]  # no forward that is cached is a prompt's last
        read = max(self._schedule.ends(request.prompt)[:-1], default=0)
        end = max(self._schedule.ends(prompt)[:-1], default=0)
        if end > read and len(prompt) <= self._context_length:
            reader = replace(
                request,
                name=f"{request.name}-read",
                prompt=prompt,
                replay=(),
                grammar=None,
                drafting=changed(request.drafting, prompt_lookup=False),
                loop_limits=None,
                received=None,
            )
            self._waiting.append((reader, end))

    def take(self) -> tuple[Parameters, int] | None:
        """The newest answer to read and the row to read it to, or None."""
        if not self._waiting or self._unused >= MAX_UNUSED:
            return None
        return self._waiting.pop()


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(array("q", ids).tobytes()).digest()
