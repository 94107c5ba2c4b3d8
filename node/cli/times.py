"""The times of commands, in seconds."""

from dataclasses import dataclass
from typing import Final


@dataclass(slots=True)
class Times:
    """Limits on waiting, and intervals. They depend on people and on one machine, so a command has
    its own and none of the cluster's `Timing`."""

    connect_s: float = 5.0
    reply_s: float = 10.0
    model_list_s: float = 60.0
    search_s: float = 30.0
    approve_s: float = 30.0
    share_s: float = 900.0
    child_end_s: float = 5.0
    """A child process that was asked to end is killed after this."""
    stop_silence_s: float = 60.0
    """A node that was asked to end may show no sign of life for this long."""
    poll_s: float = 0.05
    health_s: float = 2.0
    """The interval of health checks, and the time limit of each."""
    service_start_s: int = 60
    service_stop_s: int = 600
    """Longer than a node that stops waits for its running answers."""
    service_look_s: float = 0.2
    service_settle_s: float = 10.0
    dial_s: float = 3.0
    silent_s: float = 30.0
    """Many heartbeats: a node that sent none for this long does not reach this node."""
    load_look_s: float = 0.5
    line_every_s: float = 10.0
    drawn_every_s: float = 0.2


TIMES: Final = Times()
