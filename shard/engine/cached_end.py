"""The end of a prompt that is cached as a whole."""

from dataclasses import dataclass

import mlx.core as mx

from .request import Request


@dataclass(frozen=True, slots=True, eq=False)
class CachedEnd:
    """A `Flight` of a request whose whole prompt is cached: its first token is read from `logits`,
    which no forward computes."""

    requests: tuple[Request]
    logits: mx.array
    """(1, V), of the prompt's last row."""

    @property
    def may_be_followed(self) -> bool:
        return False

    @property
    def is_away(self) -> bool:
        return False

    @property
    def is_back(self) -> bool:
        return True

    @property
    def is_chunk(self) -> bool:
        return False
