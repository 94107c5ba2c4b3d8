"""Who uses a placement, and when it last did something."""

import asyncio

_NEVER = float("-inf")


class Activity:
    """Times are of a monotonic clock, given by whoever notes one."""

    def __init__(self) -> None:
        self.requests = 0
        """Answers that run on it, or wait to."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self.stepped_at = _NEVER
        """When it last made a step, such as a chunk of a prompt."""
        self.spoke_at = _NEVER
        """When it last gave a token to an answer that was resumed."""
        self.probed_at = _NEVER
        """When it last gave a readiness probe a token: that it works, and no work that it has."""

        self.used_at = _NEVER
        """When it was last asked for, or an answer on it ended; first noted by `Keeping`."""
        self.keep_alive_s: float | None = None
        """How long it stays loaded without use, as the last request had it; None: as the head."""

    @property
    def worked_at(self) -> float:
        """When it last showed that it works."""
        return max(self.stepped_at, self.probed_at)

    def begin(self) -> None:
        """A request starts to use it; it is not unloaded before `end`."""
        self.requests += 1
        self.idle.clear()

    def end(self) -> None:
        self.requests -= 1
        if self.requests == 0:
            self.idle.set()
