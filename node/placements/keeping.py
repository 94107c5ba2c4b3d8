"""How long models stay loaded without use: the setting, and what requests say (`keep_alive`)."""

import math
import time
from collections.abc import Callable, Iterable

from ..machine.setting_values import LONGEST
from .loaded_placement import LoadedPlacement


class Keeping:
    """Says what is due to be unloaded; `clock` gives monotonic seconds."""

    def __init__(
        self,
        keep_alive_s: float,
        just_given_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keep_alive_s`: the setting; infinity for ever. `just_given_s`: see `PlacementTiming`."""
        self._keep_alive_s = keep_alive_s
        self._just_given_s = just_given_s
        self._clock = clock

    def touch(self, record: LoadedPlacement) -> None:
        """It was given to somebody who is about to use it."""
        record.activity.used_at = self._clock()

    def release(self, record: LoadedPlacement) -> None:
        """It is due once it is idle."""
        record.activity.keep_alive_s = 0.0

    def extend(self, record: LoadedPlacement, keep_alive_s: float, *, trusted: bool) -> None:
        """A request says how long it stays. Not `trusted`: that lengthens its stay at most, up to
        the setting, since another user of the machine may not unload what everybody uses."""
        if trusted:
            record.activity.keep_alive_s = keep_alive_s
            return
        allowed_s = min(keep_alive_s, self._keep_alive_s)
        if allowed_s > self._patience_s(record):
            record.activity.keep_alive_s = allowed_s

    def left_s(self, record: LoadedPlacement) -> float:
        """Seconds until it is due if nobody uses it; infinity for never."""
        idle_s = self._clock() - record.activity.used_at if not record.activity.requests else 0.0
        return max(0.0, self._patience_s(record) - max(0.0, idle_s))

    def due(self, records: Iterable[LoadedPlacement]) -> list[LoadedPlacement]:
        """Those that were idle for long enough."""
        return [record for record in records if self._is_due(record)]

    def in_the_way(self, records: Iterable[LoadedPlacement]) -> LoadedPlacement | None:
        """What may be unloaded early to make room: idle, and not meant to stay for ever. The one
        that was used longest ago."""
        idle = [
            record
            for record in records
            if self.may_go(record) and self._patience_s(record) != math.inf
        ]
        return min(idle, key=lambda record: record.activity.used_at, default=None)

    def may_go(self, record: LoadedPlacement) -> bool:
        """Whether nobody uses it, or is about to."""
        given_s = self._clock() - record.activity.used_at
        return self._rests(record) and given_s >= self._just_given_s

    def _is_due(self, record: LoadedPlacement) -> bool:
        activity, now = record.activity, self._clock()
        if activity.used_at == -math.inf:
            activity.used_at = now  # it was just loaded, or adopted
        patience_s = max(self._just_given_s, self._patience_s(record))
        return self._rests(record) and now - activity.used_at >= patience_s

    def _rests(self, record: LoadedPlacement) -> bool:
        return record.status == "ready" and not record.activity.requests

    def _patience_s(self, record: LoadedPlacement) -> float:
        asked = record.activity.keep_alive_s
        patience_s = self._keep_alive_s if asked is None else asked
        return patience_s if patience_s <= LONGEST else math.inf
