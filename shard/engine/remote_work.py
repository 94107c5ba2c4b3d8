"""Work of a split model's first stage that is in flight on the other stages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...mtp.batch_verdict import RowDrafts
from ...placement.errors import ExoNodeError
from ..pipeline.link import Trip
from .request import Request
from .round_plan import RoundPlan
from .scheduler import Flight


@dataclass(slots=True, eq=False)
class RemoteWork(Flight):
    """Work in flight on the other stages."""

    kind: Literal["prefix_query", "chunk", "last_chunk", "log", "round", "copy_query"]
    """`last_chunk`: its last row gives the first token. `log`: rounds that are repeated."""
    trip: Trip
    plan: RoundPlan | None = None
    """The plan of a round."""
    drafts: RowDrafts | None = None
    """The drafts that a round copies."""
    issued_at: float = 0.0
    own_faults: Mapping[Request, ExoNodeError] = field(default_factory=dict[Request, ExoNodeError])
    """Errors of requests on this stage; the rows of the other requests are sent nevertheless."""

    @property
    def is_away(self) -> bool:
        return True

    @property
    def is_back(self) -> bool:
        return self.trip.is_back

    @property
    def faults(self) -> Mapping[Request, ExoNodeError]:
        """Errors by request, once it is back; this stage's own take precedence."""
        remote = {r: self.trip.faults[r.key] for r in self.requests if r.key in self.trip.faults}
        return remote | dict(self.own_faults)

    @property
    def is_chunk(self) -> bool:
        return self.kind in ("chunk", "last_chunk", "log")
