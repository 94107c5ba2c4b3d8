"""Work in flight: issued and not read yet."""

from dataclasses import KW_ONLY, dataclass

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
