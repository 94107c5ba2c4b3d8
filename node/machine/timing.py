"""The periods, timeouts and backoffs of a node, in seconds.

The fields of `Timing` are the base values. Each `_Derived` is one more; its docstring explains the
factor.

`LAN` is for real use. `LOCAL` is for several nodes on one machine, such as tests: it shortens the
backoffs, because a person waits for them, and lengthens the drain, because answers are slow where
nodes share cores. Heartbeats stay the same, because a loaded machine pauses its processes for
seconds. Security limits are the same in both.

The composition root gives the parts a profile; no part chooses one. A time is a constant of its
module only where it belongs to that module alone: the timeout of a call outside the cluster, the
bound on a value, the buckets of a histogram, a command's own timeout, the lifetime of a credential,
a limit against abuse. `tests/node/machine/test_timing.py` lists those.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Generic, Literal, TypeVar

_Value = TypeVar("_Value", int, float)


class _Derived(Generic[_Value]):
    """A time that follows from others of its profile."""

    def __init__(self, of: "Callable[[Timing], _Value]") -> None:
        self._of = of

    def __get__(self, timing: "Timing", _: object = None) -> _Value:
        return self._of(timing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A profile. Times of the cluster follow from its heartbeat, those of retries from theirs."""

    heartbeat_s: float = 1.0
    """The interval of heartbeats to a node, and the timeout of each."""
    tick_s: float = 0.25
    """The interval of cheap looks at what others wait for: the membership, a head, a drain."""
    reply_s: float = 5.0
    """The timeout of a reply that needs no person, no computation and no large file."""
    keep_alive_s: float = 2.0
    """The longest silence of a stream that waits: some clients give up after a few seconds."""
    stall_s: float = 30.0
    """A transfer or a lost answer that makes no progress for this long is given up."""
    drain_s: float = 30.0
    """How long a stopping node waits for an answer without progress, and a replaced placement."""
    retry_s: float = 1.0
    """The first backoff after a failure; each further one is twice as long."""
    max_retry_s: float = 10.0
    """The longest backoff of a dial, a call to a join port, and a background loop."""
    max_pause_s: float = 60.0
    """The longest backoff of a load, which is expensive."""
    forget_after_s: float = 60.0
    """Dead nodes, and addresses that had nothing to offer, are remembered for this long."""
    refresh_s: float = 300.0
    """The interval of measurements of a link."""

    slow_reply_s = _Derived(lambda t: 2 * t.reply_s)
    """Twice a reply: with a write to a disk, or of a node or runner that loads a model."""
    long_reply_s = _Derived(lambda t: 2 * t.stall_s)
    """Twice a stall: the text of a prompt, which has limits of its own, or the headers of a
    model's files."""

    # ------------------------------------------------------------- failure detection, election

    doubt_after_s = _Derived(lambda t: t.heartbeat_s)
    """One heartbeat: a node that sent one meanwhile is suspected for no refusal or report."""
    refused_dead_after_s = _Derived(lambda t: 1.25 * t.heartbeat_s)
    """A node whose own address refuses connections: one heartbeat, and a quarter of slack."""
    suspect_after_s = _Derived(lambda t: 1.5 * t.heartbeat_s)
    """One heartbeat is missing, by half an interval."""
    dead_after_s = _Derived(lambda t: 3.5 * t.heartbeat_s)
    """Three heartbeats are missing, the last by half an interval."""
    refused_again_s = _Derived(lambda t: 0.8 * t.tick_s)
    """Two refusals count as two. Dials are a tick apart, and the clock may be early."""
    lease_s = dead_after_s
    """A head that was stopped for longer counts as dead, and may have a successor."""
    waking_s = _Derived(lambda t: 1.5 * t.heartbeat_s)
    """A node that was stopped first listens until every live node's heartbeat is due."""
    patience_s = _Derived(lambda t: 3 * t.heartbeat_s)
    """Three heartbeats: what each of them should bring, such as a head or a loaded stage."""
    stagger_s = _Derived(lambda t: t.dead_after_s + 0.5 * t.heartbeat_s)
    """Each node leads later than one with a lower id, which would be dead by then."""
    election_s = _Derived(lambda t: t.dead_after_s + 2.5 * t.heartbeat_s)
    """The old head is dead, and the next one has had two heartbeats to say that it leads."""
    clearly_s = _Derived(lambda t: 5 * t.heartbeat_s)
    """Two heads agree which of them has led longer, though a heartbeat may be 3.5 old."""
    known_backoff_s = _Derived(lambda t: max(t.heartbeat_s, 3 * t.retry_s))
    """The longest backoff of an address that answered once: a node that returns is found soon,
    at the cost of at most one dial a heartbeat."""
    report_timeout_s = _Derived(lambda t: 2 * t.heartbeat_s)
    """A report on an answer's progress: the next one repeats it."""

    # -------------------------------------------------------------------------- observation

    watch_s = _Derived(lambda t: t.heartbeat_s)
    """The interval of looks at stages, runners and links, which change with heartbeats."""
    silence_s = _Derived(lambda t: 5 * t.keep_alive_s)
    """Without five signs of life the other side is gone."""
    silent_ticks = _Derived(lambda t: round(t.silence_s / t.watch_s))
    """`silence_s` in looks at a runner: while this process is paused, none are counted."""
    steady_s = silence_s
    """Work that runs for as long as silence may last has recovered."""
    quiet_s = _Derived(lambda t: 2 * t.tick_s)
    """Two ticks without an event of an answer: its stages are pinged."""
    ping_s = stagger_s
    """Longer than a pause that a node survives: a stage declared lost reads its prompts again."""
    rescan_s = _Derived(lambda t: t.refresh_s / 10)
    """Network interfaces, mDNS where it failed, and a link whose first measurement the node's
    start may have disturbed: ten times as often as links are measured."""
    overdue_s = _Derived(lambda t: 2 * t.rescan_s)
    """A link that was never measured is measured during an answer after two rescans."""
    scan_s = _Derived(lambda t: 5 * t.heartbeat_s)
    """Models on the disk: five heartbeats, because a list that is requested scans itself."""

    # ---------------------------------------------------------------------------- placements

    claim_grace_s = watch_s
    """A placement that was given to a request counts as used until the next look."""
    takeover_s = _Derived(lambda t: 5 * t.heartbeat_s)
    """A new head adopts runners, and their answers claim them, before it unloads any."""
    state_lease_s = _Derived(lambda t: round(t.silence_s))
    """A runner frees a request's state that no frame has touched in `silence_s`."""
    crowded_after_s = silence_s
    """Several answers share a replica for that long before another one is loaded for them."""
    move_gain_s = quiet_s
    """A conversation leaves the replica that has most of it for no less: times are estimates."""
    refill_every_s = silence_s
    """Until another load of a missing replica: a node that did not answer is dead by then."""
    settle_after_s = _Derived(lambda t: 2 * t.forget_after_s)
    """A displaced placement that is idle moves once a lost node would be forgotten twice over:
    a request must wait for the load."""
    failures_within_s = _Derived(lambda t: 10 * t.max_pause_s)
    """Ten of the longest backoffs: an earlier failure no longer counts, and is logged again."""

    # ------------------------------------------------------------- joining, HTTP, model files

    look_again_s = _Derived(lambda t: 3 * t.retry_s)
    """A control port that a person named, or a join port that has nothing to do yet: it
    answers, so it is called less often than one that failed."""
    grace_s = _Derived(lambda t: round(t.slow_reply_s))
    """A closing API server, and the ports that it frees: as long as a slow reply."""
    events_keep_alive_s = _Derived(lambda t: t.stall_s / 2)
    """The silence on the stream of events: twice within the time after which clients and
    proxies take it for stalled."""
    digest_timeout_s = _Derived(lambda t: 60 * t.stall_s)
    """Half an hour: 50 GB from a disk that reads 30 MB a second."""


Profile = Literal["lan", "local"]

LAN: Final = Timing()
LOCAL: Final = replace(LAN, retry_s=0.25, max_retry_s=2.0, drain_s=180.0)
PROFILES: Final[Mapping[Profile, Timing]] = {"lan": LAN, "local": LOCAL}
"""The profiles by the value of EXO_TIMING."""
