"""A preview of a placement, ready for the wire."""

from typing import Any

from ..placement.cluster import ClusterView
from ..placement.plan import Placement, Preview


def as_json(found: Preview, view: ClusterView, drafting: str) -> dict[str, Any]:
    """The body of `GET /v1/placements/preview`; `drafting` says why the model drafts, or not."""
    return {
        "object": "placement.preview",
        "model": found.best.model,
        "best": _placement(found.best, view),
        "runner_up": found.runner_up and _placement(found.runner_up, view),
        "bound_s": found.bound_s,
        "proven": found.bound_s >= found.best.score,
        "candidates_considered": found.candidates_considered,
        "drafting": drafting,
    }


def _placement(placement: Placement, view: ClusterView) -> dict[str, Any]:
    return {
        "stages": [
            {
                "node": stage.node,
                "name": view.node(stage.node).name,
                "layers": [stage.first_layer, stage.end_layer],
            }
            for stage in placement.stages
        ],
        "seconds_per_token": placement.score,
        "context_length": placement.context_length,
        "reason": placement.reason,
    }
