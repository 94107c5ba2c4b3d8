"""The periods, timeouts and backoffs of a node, in seconds.

The fields of `Timing` are the base values; each property derives one more and explains its factor.

`LAN` is for real use. `LOCAL` is for several nodes on one machine, such as tests: it shortens the
backoffs, because a person waits for them, and lengthens the drain, because answers are slow where
nodes share cores. Heartbeats stay the same, because a loaded machine pauses its processes for
seconds. Security limits are the same in both.

The composition root gives the parts a profile; no part chooses one. A time is a constant of its
module only where it belongs to that module alone: the timeout of a call outside the cluster, the
bound on a value, the buckets of a histogram, a command's own timeout, the lifetime of a credential,
a limit against abuse. `tests/node/machine/test_timing.py` lists those.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal


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
    restart_drain_s: float = 300.0
    """The limit on a drain before a rekey's restart: a lost machine's key is good until then."""
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

    @property
    def slow_reply_s(self) -> float:
        """Twice a reply: with a write to a disk, or of a node or runner that loads a model."""
        return 2 * self.reply_s

    @property
    def long_reply_s(self) -> float:
        """Twice a stall: the text of a prompt, which has limits of its own, or the headers of a
        model's files."""
        return 2 * self.stall_s

    # ------------------------------------------------------------- failure detection, election

    @property
    def doubt_after_s(self) -> float:
        """One heartbeat: a node that sent one meanwhile is suspected for no refusal or report."""
        return self.heartbeat_s

    @property
    def refused_dead_after_s(self) -> float:
        """A node whose own address refuses connections: one heartbeat, and a quarter of slack."""
        return 1.25 * self.heartbeat_s

    @property
    def suspect_after_s(self) -> float:
        """One heartbeat is missing, by half an interval."""
        return 1.5 * self.heartbeat_s

    @property
    def dead_after_s(self) -> float:
        """Three heartbeats are missing, the last by half an interval."""
        return 3.5 * self.heartbeat_s

    @property
    def refused_again_s(self) -> float:
        """Two refusals count as two. Dials are a tick apart, and the clock may be early."""
        return 0.8 * self.tick_s

    lease_s = dead_after_s
    """A head that was stopped for longer counts as dead, and may have a successor."""

    @property
    def waking_s(self) -> float:
        """A node that was stopped first listens until every live node's heartbeat is due."""
        return 1.5 * self.heartbeat_s

    @property
    def patience_s(self) -> float:
        """Three heartbeats: what each of them should bring, such as a head or a loaded stage."""
        return 3 * self.heartbeat_s

    @property
    def stagger_s(self) -> float:
        """Each node leads later than one with a lower id, which would be dead by then."""
        return self.dead_after_s + 0.5 * self.heartbeat_s

    @property
    def election_s(self) -> float:
        """The old head is dead, and the next one has had two heartbeats to say that it leads."""
        return self.dead_after_s + 2.5 * self.heartbeat_s

    @property
    def clearly_s(self) -> float:
        """Two heads agree which of them has led longer, though a heartbeat may be 3.5 old."""
        return 5 * self.heartbeat_s

    @property
    def known_backoff_s(self) -> float:
        """The longest backoff of an address that answered once: a node that returns is found soon,
        at the cost of at most one dial a heartbeat."""
        return max(self.heartbeat_s, 3 * self.retry_s)

    @property
    def report_timeout_s(self) -> float:
        """A report on an answer's progress: the next one repeats it."""
        return 2 * self.heartbeat_s

    # -------------------------------------------------------------------------- observation

    @property
    def watch_s(self) -> float:
        """The interval of looks at stages, runners and links, which change with heartbeats."""
        return self.heartbeat_s

    @property
    def silence_s(self) -> float:
        """Without five signs of life the other side is gone."""
        return 5 * self.keep_alive_s

    @property
    def silent_ticks(self) -> int:
        """`silence_s` in looks at a runner: while this process is paused, none are counted."""
        return round(self.silence_s / self.watch_s)

    steady_s = silence_s
    """Work that runs for as long as silence may last has recovered."""

    @property
    def quiet_s(self) -> float:
        """Two ticks without an event of an answer: its stages are pinged."""
        return 2 * self.tick_s

    ping_s = stagger_s
    """Longer than a pause that a node survives: a stage declared lost reads its prompts again."""

    @property
    def rescan_s(self) -> float:
        """Network interfaces, mDNS where it failed, and a link whose first measurement the node's
        start may have disturbed: ten times as often as links are measured."""
        return self.refresh_s / 10

    @property
    def overdue_s(self) -> float:
        """A link that was never measured is measured during an answer after two rescans."""
        return 2 * self.rescan_s

    @property
    def scan_s(self) -> float:
        """Models on the disk: five heartbeats, because a list that is requested scans itself."""
        return 5 * self.heartbeat_s

    # ---------------------------------------------------------------------------- placements

    claim_grace_s = watch_s
    """A placement that was given to a request counts as used until the next look."""

    @property
    def takeover_s(self) -> float:
        """A new head adopts runners, and their answers claim them, before it unloads any."""
        return 5 * self.heartbeat_s

    @property
    def state_lease_s(self) -> int:
        """A runner frees a request's state that no frame has touched in `silence_s`."""
        return round(self.silence_s)

    crowded_after_s = silence_s
    """Several answers share a replica for that long before another one is loaded for them."""

    move_gain_s = quiet_s
    """A conversation leaves the replica that has most of it for no less: times are estimates."""

    refill_every_s = silence_s
    """Until another load of a missing replica: a node that did not answer is dead by then."""

    @property
    def settle_after_s(self) -> float:
        """A displaced placement that is idle moves once a lost node would be forgotten twice over:
        a request must wait for the load."""
        return 2 * self.forget_after_s

    @property
    def failures_within_s(self) -> float:
        """Ten of the longest backoffs: an earlier failure no longer counts, and is logged again."""
        return 10 * self.max_pause_s

    # ------------------------------------------------------------- joining, HTTP, model files

    @property
    def look_again_s(self) -> float:
        """A control port that a person named, or a join port that has nothing to do yet: it
        answers, so it is called less often than one that failed."""
        return 3 * self.retry_s

    @property
    def grace_s(self) -> int:
        """A closing API server, and the ports that it frees: as long as a slow reply."""
        return round(self.slow_reply_s)

    @property
    def events_keep_alive_s(self) -> float:
        """The silence on the stream of events: twice within the time after which clients and
        proxies take it for stalled."""
        return self.stall_s / 2

    @property
    def digest_timeout_s(self) -> float:
        """Half an hour: 50 GB from a disk that reads 30 MB a second."""
        return 60 * self.stall_s


Profile = Literal["lan", "local"]

LAN: Final = Timing()
LOCAL: Final = replace(LAN, retry_s=0.25, max_retry_s=2.0, drain_s=180.0)
PROFILES: Final[Mapping[Profile, Timing]] = {"lan": LAN, "local": LOCAL}
"""The profiles by the value of EXO_TIMING."""
