"""When a placement that losses have moved is placed anew: after a while without work, and for gain.

A model whose second machine went on a walk would else stay on the first one for good.
"""

import time
from collections.abc import Callable

from ..placement.cluster import ClusterView
from ..placement.plan import Placement, seconds_now
from .records import Record

SETTLE_AFTER_S = 120.0
"""Without an answer, and between two looks: a load makes whoever asks meanwhile wait."""
WORTHWHILE = 0.9
"""Of the present seconds a token: what is hardly faster is not worth a load."""


def may_settle(record: Record, clock: Callable[[], float] = time.monotonic) -> bool:
    """Whether it is time to look for a better place. Notes the look."""
    now = clock()
    quiet = now - max(record.moved_at, record.stepped_at) >= SETTLE_AFTER_S
    if not (record.moved and record.status == "ready" and not record.active and quiet):
        return False
    record.moved_at = now
    return True


def settles(record: Record, planned: Placement, view: ClusterView) -> str:
    """Why the placement is better made anew as `planned`; empty where it is not."""
    if not {stage.node for stage in record.plan.stages} <= {node.id for node in view.nodes}:
        return ""  # about to be lost, or to come back
    used = len({stage.node for stage in record.plan.stages})
    wanted = len({stage.node for stage in planned.stages})
    if used < record.options.min_nodes and used < wanted:
        return f"{wanted} nodes can hold it again, as was asked for"
    present = seconds_now(record.card, view, record.plan.stages)
    if planned.score > WORTHWHILE * present:
        return ""
    return f"{1000 * planned.score:.3g} ms a token are expected there, {1000 * present:.3g} here"
