"""The seams of the loop: what verifies, here or over nodes, what drafts, what ends an answer."""

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, cast

import mlx.core as mx

from .types import FinishReason

Want = Literal["all", "last", "none"]
"""The rows of a forward whose logits are read."""

FORWARD_FAULTS: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that MLX or a model's class raises in a forward. In a forward that several requests
share, each of them is a fault of the forward and of none of the requests."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Yielded by a generation that can go on only after another thread finished `future`.

    Whoever drives the generation may run others in the meantime and resumes it afterwards. The
    future's result is read by the one who yielded it.
    """

    future: "Future[Any]"
    reads: bool | None = None
    """Whether a chunk of a prompt follows; None: as before."""
    goes_on: bool = False
    """Whether its turn goes on behind this: no other one's chunk is to come before."""
    part: bool = False
    """Whether it computed a part of a chunk: once those that answer had a turn, the next follows.
    """

    @classmethod
    def a_part(cls) -> "Wait":
        """Lets those that answer have their turn, in the middle of a chunk."""
        done: Future[Any] = Future()
        done.set_result(None)
        return cls(done, reads=True, part=True)

    @classmethod
    def a_turn(cls, *, reads: bool | None = None) -> "Wait":
        """Lets others have their turn."""
        done: Future[Any] = Future()
        done.set_result(None)
        return cls(done, reads, goes_on=True)


class Block(NamedTuple):
    """What one forward of the target gives."""

    logits: mx.array  # (rows, 1 or 0, vocabulary)
    hidden: mx.array | None  # (1, rows, hidden_size) as the draft head wants it, if one was asked
    batch: int = 1  # requests that the forward computed


class Drafts(NamedTuple):
    """K drafted tokens and, where acceptance needs them, the log-probabilities they came from."""

    tokens: mx.array  # (K,)
    log_probabilities: mx.array | None  # (K, n)
    support: mx.array | None = None  # (K, n) their ids; None: 0, 1, .. n - 1
    finite: mx.array | None = None  # (K,) whether the logits of each were


class Verifier(Protocol):
    """The target model with the state of one request. Rows are appended, then some rolled back."""

    overlaps: bool
    """Whether a forward may be issued for a token that is not computed yet (lazy evaluation)."""
    takes_back: bool
    """Whether `rollback` can: else one row more than the answer's may be left behind at its end."""

    @property
    def position(self) -> int:
        """Rows in the caches."""
        ...

    def forward(self, tokens: mx.array, *, want: Want) -> Generator[Wait, None, Block]:
        """Appends (rows,) ids and gives the logits of the rows that are wanted.

        A prompt's last chunk wants the last row, the chunks before it none: a verifier over several
        nodes then returns at once, with whatever the logits hold. The result is lazy where the
        verifier is local. Raises PeerLost where it is not.
        """
        ...

    def rollback(self, rows: int) -> None:
        """Drops the last `rows` rows, which the last forward must have appended."""
        ...

    def arrays(self) -> list[mx.array]:
        """What the request holds in memory here; evaluating it ends the graph behind it."""
        ...


class RemoteVerifier(Verifier, Protocol):
    """A verifier whose logits come from other nodes.

    A forward whose logits nobody reads asks them for none.
    """

    def repeat(self, tokens: mx.array, schedule: Sequence[int]) -> None:
        """Appends (rows,) ids by forwards of `schedule` rows each, whose results nobody reads.

        They follow each other through the other nodes without waiting.
        """
        ...


class Drafter(Protocol):
    """Proposes tokens and learns which rows were committed."""

    k: int
    """Drafts per round; 0: none."""

    @property
    def rests(self) -> bool:
        """Whether it had better not be asked for drafts now, whatever they would be worth."""
        ...

    def draft(self, k: int, position: int) -> Drafts:
        """`k` >= 1 tokens for the positions from `position` on; lazy, evaluation under way."""
        ...

    def observe(self, hidden: mx.array | None, tokens: mx.array) -> None:
        """Committed rows: hidden (1, n, hidden_size) and the token (n,) that follows each."""
        ...

    def catch_up(self) -> None:
        """Reads the rows that were committed, as `draft` does first: no draft is wanted of them."""
        ...

    def arrays(self) -> list[mx.array]:
        """As `Verifier.arrays`, for the drafter's own state."""
        ...


class StopCondition(Protocol):
    """Sees each token as plain decoding would emit it and says when the answer is over."""

    def push(self, token: int) -> FinishReason | None:
        """None while the answer goes on; `token` is part of the answer in any case."""
        ...


def as_row(tokens: Sequence[int]) -> mx.array:
    """Ids as the (rows,) int32 array that `Verifier.forward` takes."""
    return mx.array(list(tokens), dtype=mx.int32)


def as_ids(row: mx.array) -> list[int]:
    """The inverse; it waits until the row is computed."""
    return cast("list[int]", row.tolist())
