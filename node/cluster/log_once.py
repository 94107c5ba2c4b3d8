"""What was told already: a line for each thing, and not for each time that it is noticed."""

from typing import Final

_MOST: Final = 256


class LogOnce:
    """Remembers the last 256 pairs; an older one may be told again."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], None] = {}

    def is_new(self, who: str, what: str) -> bool:
        """Whether it was not told before; from now on it was."""
        new = (who, what) not in self._pairs
        _ = self._pairs.pop((who, what), None)
        self._pairs[who, what] = None
        while len(self._pairs) > _MOST:
            del self._pairs[next(iter(self._pairs))]
        return new
