"""The readers of one prompt, as the answering engine sees them, and forwards on their way there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ....placement.errors import ExoNodeError
from ....proto import peer_pb2 as pb
from ...checkpoint.files import Buffer
from ...checkpoint.prefix_files import ReceivedPrefix
from ...pipeline.frames import HiddenBlock
from .layer_rows import LayerForm, Selection


class LayerRange(NamedTuple):
    """The layers [first, end) of one reader."""

    first: int
    end: int


@dataclass(slots=True, eq=False)
class ReadTrip:
    """One forward over a prompt on its way through all readers."""

    results: list[ReceivedPrefix] = field(default_factory=list[ReceivedPrefix])
    """The file that each reader returned, in the order of its layers."""
    fault: ExoNodeError | None = None
    """Why they return no more."""
    is_back: bool = False
    """Whether all of them have returned it, or none will. Set last: before, another thread owns the
    other fields."""


@dataclass(slots=True, eq=False)
class ReadOutcome:
    """How one prompt was read, for the stats of its answer."""

    nodes: Sequence[str] = ()
    """Nodes that read a part of it; empty if it was read alone."""
    reason: str = ""
    """Why by those, or why alone; empty where it had no choice."""
    seconds: float = 0.0
    """From its first forward to the last one that came back."""
    bytes: int = 0
    """Bytes that were sent and received."""
    other_kind: bool = False
    """Whether a part of it came from another kind of machine."""


class Readers(Protocol):
    """Called on the compute thread; never blocks and raises nothing."""

    outcome: ReadOutcome
    layers: Sequence[LayerRange]
    """The layers of each reader, in order; the last one's end with the model's."""

    def open(
        self,
        forms: Sequence[LayerForm],
        begin: pb.ReadBegin,
        states: Sequence[Iterator[Buffer]],
    ) -> None:
        """Begins to read a prompt after its first `begin.rows` rows.

        `forms`: what each reader's caches look like. `begin` has what all readers get; `hidden` is
        the last one's, the others return the hidden states of all rows. `states`: the file of each
        reader's state after those rows, in pieces that other threads make; empty if there are none.
        """
        ...

    def send(self, block: HiddenBlock, data: Callable[[], bytes], selection: Selection) -> ReadTrip:
        """Sends the next forward's rows. `data`: gives those of `block` on another thread, which
        waits for the device, or raises NumericError. `selection`: the part that the last
        reader returns; the others return the hidden states of all rows."""
        ...

    def close(self) -> None:
        """Frees the readers; trips under way do not come back."""
        ...
