"""The state that another runner sent for one request."""

import logging
from collections.abc import Callable
from typing import Any

from ...checkpoint.prefix_files import ReceivedPrefix
from ..states.state import State
from .encoding import CONTENT_FAULTS, read_state
from .prompt_path import PromptPath

log = logging.getLogger(__name__)


class PeerPrefix:
    """A `Tier` of one state, for the prompt that it was asked for."""

    def __init__(self, received: ReceivedPrefix, make_caches: Callable[[], list[Any]]) -> None:
        """`make_caches` makes the empty caches of one request."""
        self._received = received
        self._make_caches = make_caches

    @property
    def size(self) -> int:
        """Bytes that are still in memory."""
        return self._received.held_bytes

    def find(self, path: PromptPath, beyond: int = 0, live: int = 0) -> State | None:
        """See `Tier.find`. A state is given once."""
        if self._received.rows <= beyond:
            return None
        try:
            state = read_state([self._received], self._make_caches, path.ids)
        except CONTENT_FAULTS as fault:  # the prompt is then read without it
            why = str(fault) or type(fault).__name__
            log.warning("a state from another node cannot be used: %s", why)
            return None
        state.tier = "peer"
        return state

    def evict(self, live: int | None = None) -> None:
        """Frees it."""
        self._received.free()
