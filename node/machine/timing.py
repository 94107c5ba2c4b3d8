"""The rhythm of a node: every period, patience and backoff by which its parts wait for each other.

`LAN` is for real use. `LOCAL` is for processes on one machine, such as tests: it shortens only what
makes a person wait for things to settle, and lets a node that stops wait longer for its answers,
which are slow where nodes share cores. Heartbeats and suspicion keep the LAN's values, because a
loaded machine pauses its processes for seconds. Security limits are the same in every profile.

The composition root hands the profile, or one of its groups, to the parts; no part names one. A
value that follows from another is a property. All values are in seconds.

A time stays a constant of its module where nothing else waits by it: the bound on one call to
something outside, the bound on a value, the buckets of a histogram, a command's own patience, the
lifetime of a credential, a limit against abuse. `tests/node/machine/test_timing.py` lists those.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTiming:
    """Heartbeats, and what membership and election make of them."""

    heartbeat_s: float = 1.0
    """Between two heartbeats to a node; the unit of most of what follows."""
    tick_s: float = 0.25
    """Between two looks at the clock by membership and election."""
    head_wait_s: float = 1.0
    """How long a node that may have peers looks for their head before it leads by itself."""
    refused_again_s: float = 0.2
    """Two refusals of a connection further apart than this count as two."""
    forget_after_s: float = 60.0
    """A node that died or left is forgotten then, and with it its incarnation."""
    clearly_s: float = 5.0
    """A lead in time that two heads see alike, however late their heartbeats are."""
    quick_try_s: float = 0.25
    """After heartbeats that a live node did not answer: whether its process is there at all."""
    max_backoff_s: float = 10.0
    """Between two tries of an address that never answered."""
    known_backoff_s: float = 3.0
    """Longest backoff of an address that answered once, so that a returning node is found soon."""
    report_timeout_s: float = 2.0
    """Timeout of a report on an answer's progress; the next report repeats it."""

    @property
    def exchange_timeout_s(self) -> float:
        """A heartbeat's answer that is later than the next heartbeat is none."""
        return self.heartbeat_s

    @property
    def doubt_after_s(self) -> float:
        """A node heard within this time is suspected neither on another's word nor for a
        refusal."""
        return self.heartbeat_s

    @property
    def late_after_s(self) -> float:
        """Ticks come four times a heartbeat: what a gap has beyond one is this node's own pause."""
        return self.heartbeat_s

    @property
    def suspect_after_s(self) -> float:
        """A heartbeat and a half: one is missing."""
        return 1.5 * self.heartbeat_s

    @property
    def refused_dead_after_s(self) -> float:
        """A heartbeat and a quarter: a node that only its own address refuses is heard
        meanwhile."""
        return 1.25 * self.heartbeat_s

    @property
    def dead_after_s(self) -> float:
        """Three heartbeats were missed."""
        return 3.5 * self.heartbeat_s

    @property
    def lease_s(self) -> float:
        """A head that was stopped for longer cannot know who leads now; the others think it
        dead."""
        return self.dead_after_s

    @property
    def waking_s(self) -> float:
        """How long a node that was stopped listens before anything else: a heartbeat and a half."""
        return 1.5 * self.heartbeat_s

    @property
    def patience_s(self) -> float:
        """How long a node waits for a head that it knows of but cannot follow yet."""
        return 3 * self.heartbeat_s

    @property
    def stagger_s(self) -> float:
        """How much longer each next node waits for those with a lower id: until they would be
        dead, and half a heartbeat."""
        return self.dead_after_s + 0.5 * self.heartbeat_s

    @property
    def election_s(self) -> float:
        """How long a request waits for a head: until the old one is dead, and the new one is
        known."""
        return self.dead_after_s + 2.5 * self.heartbeat_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryTiming:
    """mDNS."""

    resolve_s: float = 3.0
    """Timeout for records that an announcement did not contain."""
    echo_s: float = 5.0
    """Until this node hears its own announcement; after that multicast does not work here."""
    ask_again_s: float = 1.2
    """Longer than the second within which a responder does not repeat itself."""
    rescan_s: float = 30.0
    """Between two looks at the machine's interfaces, and before mDNS is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTiming:
    """Measurements of links."""

    check_s: float = 1.0
    """Between two looks at whether a link is due."""
    refresh_s: float = 300.0
    """Between two measurements of a link."""
    second_look_s: float = 30.0
    """After the first measurement, which the start of a node may have disturbed."""
    patience_s: float = 60.0
    """A link that was never measured is measured in spite of a generation after this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTiming:
    """The join port, both sides. Limits on attempts are no part of this: see `join/requests.py`."""

    connect_s: float = 5.0
    """Timeout of a TCP connection and its TLS handshake."""
    answer_s: float = 5.0
    """Timeout of each frame before the digits are shown; no person is involved yet."""
    stored_s: float = 10.0
    """Timeout for the other side to store a key on its disk."""
    waiting_every_s: float = 2.0
    """Between two signs of life of a node that waits for a person."""
    retry_s: float = 1.0
    """Before another try at a join port; doubled with each that fails."""
    max_retry_s: float = 15.0
    """Between two tries at a join port, at most."""
    quiet_s: float = 60.0
    """How long an address is left alone once it is clear that there is nothing to ask there."""
    look_again_s: float = 3.0
    """While the other one should ask, or another address of its cluster is asked already."""
    look_at_peer_s: float = 5.0
    """Between two looks at a control port that a person named."""
    watch_s: float = 1.0
    """Between two looks at whether somebody else is in the cluster."""
    settle_s: float = 3.0
    """A fresh node with --open lets nobody in so early: it may see a smaller id until then."""
    fresh_s: float = 10.0
    """A node that was not heard for so long is not asked: whoever comes under its id is it."""
    rekey_again_s: float = 1.0
    """Between two tries to hand a new key to a member."""

    @property
    def silence_s(self) -> float:
        """Without five signs of life the other side is gone."""
        return 5 * self.waiting_every_s

    @property
    def too_many_s(self) -> float:
        """After a refusal for too many tries."""
        return self.max_retry_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementTiming:
    """The head's work on placements."""

    watch_s: float = 1.0
    """Between two looks at the stages that heartbeats name."""
    loading_every_s: float = 1.0
    """Between two words to whoever waits for a load."""
    taking_over_s: float = 5.0
    """How long a claim waits for a new head to adopt what the old one held."""
    ping_s: float = 4.0
    """Timeout of a stage's ping on a quick link. A loaded machine pauses its processes for seconds,
    and a stage that is wrongly declared lost reads its prompts again."""
    drain_s: float = 30.0
    """How long answers on a placement that is replaced or removed may take to end."""
    just_given_s: float = 1.0
    """How long a placement that was given to a request counts as used, until the request uses
    it."""
    stage_grace_s: float = 3.0
    """A ready runner that three heartbeats of its node do not name is gone."""
    lease_s: int = 10
    """A runner frees a request's state that no frame has touched for this long."""
    orphan_s: float = 5.0
    """Runners that another head loaded are known for this long before one is unloaded: their
    answers may not have been claimed here yet."""
    refill_after_s: float = 5.0
    """How long answers that a loss interrupted have the machine before spares are loaded."""
    refill_every_s: float = 10.0
    """Between two tries to load a spare that is missing."""
    settle_after_s: float = 120.0
    """Without an answer, and between two looks for a better place: a load makes whoever asks
    meanwhile wait."""
    failures_within_s: float = 600.0
    """Failures of a model's placement that are further back do not count."""
    max_pause_s: float = 60.0
    """Before what failed is loaded again: 1 s after a stage's second failure, then twice as long
    each time, at most this. A placement that cannot be restored is tried again as often."""

    @property
    def paused_s(self) -> float:
        """A process that missed three looks was stopped, and may be the head no longer."""
        return 3 * self.watch_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTiming:
    """Runner processes."""

    tick_s: float = 1.0
    """Between two looks at whether a runner said something."""
    stop_s: float = 5.0
    """Time for a runner to stop by itself before it is killed."""

    silent_ticks: int = 10
    """Without a word a ready runner is ended: it speaks four times a second, however busy its
    compute thread is. Ticks are counted, so that a pause of this process is not the runner's."""

    @property
    def silence_s(self) -> float:
        """The same as a time."""
        return self.silent_ticks * self.tick_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTiming:
    """Answers, on their entry node."""

    quiet_s: float = 0.5
    """Without a sign from the generator for this long, every stage is asked for one."""
    again_s: float = 0.2
    """Before a claim is made again at the head."""
    fresh_within_s: float = 6.0
    """How long a request waits for a head that answers: until the old one is dead and replaced."""
    resume_within_s: float = 30.0
    """The same for an answer that has begun. One that is lost again, with no progress for this long
    since it was, is given up."""
    steady_s: float = 10.0
    """An attempt that has given tokens for this long shows that its placement works."""
    recent_s: float = 10.0
    """A step this long ago says that the next one will come."""
    probe_within_s: float = 5.0
    """Timeout of the token that proves a loaded model ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTiming:
    """HTTP streams, and the end of a node."""

    heartbeat_s: float = 2.0
    """The longest time for which an answer's stream carries no data. Clients give up after
    seconds to minutes without any, and some do not count comments."""
    events_keep_alive_s: float = 15.0
    """The longest silence on the stream of events."""
    drain_s: float = 30.0
    """A node that stops waits for answers that get on, and so long for those that do not."""
    restart_drain_s: float = 300.0
    """A node with another cluster key waits so long for its answers: meanwhile it is apart from
    the nodes that have restarted, and a lost machine's key is good for it."""
    drain_poll_s: float = 0.1
    """Between two looks at whether it has."""
    grace_s: int = 10
    """How long answers in progress go on once the API closes."""
    ports_free_s: float = 10.0
    """How long a node that is built anew waits for its own ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTiming:
    """Models on the disk."""

    scan_s: float = 5.0
    """Between two looks at what is there; a list that is asked for looks itself."""
    offer_timeout_s: float = 60.0
    """Timeout of a peer's list of a model's files, whose headers it may have to read first."""
    digest_timeout_s: float = 1800.0
    """Timeout of the hash of a file: 50 GB from a disk that reads 30 MB a second."""
    chunk_timeout_s: float = 30.0
    """Timeout of the next MiB of a file; then the peer counts as lost and another continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTiming:
    """Work without an end that begins again after an error."""

    first_wait_s: float = 0.5
    """After its first error; doubled with each that follows."""
    max_wait_s: float = 10.0
    """Between two beginnings, at most."""
    steady_s: float = 5.0
    """A loop that began again and ran for this long works."""
    say_again_s: float = 600.0
    """A cause that was told is told again after this time, if it is still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The groups, each for the parts of one concern."""

    cluster: ClusterTiming = ClusterTiming()
    discovery: DiscoveryTiming = DiscoveryTiming()
    links: LinkTiming = LinkTiming()
    join: JoinTiming = JoinTiming()
    placements: PlacementTiming = PlacementTiming()
    runners: RunnerTiming = RunnerTiming()
    chat: ChatTiming = ChatTiming()
    serving: ServingTiming = ServingTiming()
    loops: LoopTiming = LoopTiming()
    models: ModelTiming = ModelTiming()


Profile = Literal["lan", "local"]

LAN: Final = Timing()
LOCAL: Final = Timing(
    cluster=replace(LAN.cluster, max_backoff_s=2.0, known_backoff_s=1.0),
    join=replace(
        LAN.join, retry_s=0.25, max_retry_s=3.0, look_again_s=0.75, look_at_peer_s=1.0, watch_s=0.25
    ),
    placements=replace(LAN.placements, refill_after_s=1.0),
    serving=replace(LAN.serving, drain_s=180.0),
)
PROFILES: Final[Mapping[Profile, Timing]] = {"lan": LAN, "local": LOCAL}
"""The profiles by the value of EXO_TIMING."""
