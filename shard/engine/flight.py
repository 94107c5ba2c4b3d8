"""Work in flight: issued and not read yet."""

from dataclasses import KW_ONLY, dataclass

import mlx.core as mx

from .request import Request


@dataclass(slots=True, eq=False)
class Flight:
    """Work for some requests, which this node's device computes unless it `is_away`."""

    requests: tuple[Request, ...]
    _: KW_ONLY
    may_be_followed: bool = False
    """Whether more work for these requests may be issued before it is read."""

    @property
    def is_away(self) -> bool:
        """Whether other stages compute it."""
        return False

    @property
    def is_back(self) -> bool:
        """Whether nothing is computed any more, so that reading it need not wait."""
        return False

    @property
    def is_chunk(self) -> bool:
        """Whether it consists of rows of a prompt or of a log."""
        return False


@dataclass(slots=True, eq=False)
class CachedEnd(Flight):
    """The end of a prompt that is cached as a whole: its first token is read from `logits`, which
    no forward computes."""

    logits: mx.array
    """(1, V), of the prompt's last row."""

    @property
    def is_back(self) -> bool:
        return True
