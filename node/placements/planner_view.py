"""This node's facts, and what placing asks: views, cards, switches."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, astuple, dataclass, replace
from typing import Literal

from ...placement.card import BlockDrafter, ModelCard
from ...placement.chunk import MOST
from ...placement.cluster import ClusterView, LayerProfile, MeasuredLayer, NodeFacts, evened
from ...placement.cost import lent
from ...placement.drafting import EnabledState
from ...placement.dtype_bytes import BYTES
from ...placement.errors import ModelNotFound
from ...placement.gpu_faults import limit_of
from ...placement.ids import ModelId, NodeId
from ...placement.library import not_here
from ...placement.split_refusal import MAY_BE_SPLIT, SplitRefusal
from ...proto import peer_pb2 as pb
from ..cluster.cluster import Cluster
from ..cluster.desired import chosen_bits
from ..cluster.member import MemberFacts
from ..links.paths import link_facts
from ..machine.switches import Switches
from ..store.fetching import ModelFetcher
from ..store.library import ModelLibrary
from .observations import STAGE_HEADROOM
from .stage_specs import StageSettings
from .state import LiveNode

Promised = Mapping[NodeId, Mapping[ModelId, int]]
"""Bytes by node and model, headroom included."""
NO_TIME_S = 3600.0
"""No layer takes so long."""
SHORTEST_S = 1e-9
"""Nor less than this: one over a few of the least numbers is endless, and no JSON."""


@dataclass(eq=False, repr=False)
class NodeFactsSource:
    """`placements.Facts` over the live members."""

    _cluster: Cluster
    _library: ModelLibrary
    _switches: Switches
    _fetcher: ModelFetcher
    _: KW_ONLY
    auto_download: bool = False
    """An answer may begin with the download of its model."""

    def __post_init__(self) -> None:
        self._self = self._cluster.self_id

    def nodes(self) -> list[LiveNode]:
        return [
            LiveNode(
                report.id,
                report.facts.memory_bytes,
                draining=report.draining,
                follows=report.head == self._self,
                alive_since=report.alive_since,
                heard_at=report.heard_at,
                stages=report.stages,
            )
            for report in self._cluster.reports()
        ]

    def name(self, node: NodeId) -> str:
        return self._cluster.name(node)

    def view(
        self, placing: ModelId, promises: Promised | None = None, *, empty: bool = False
    ) -> ClusterView:
        """`promises`: bytes that runners may take of each node, besides those that they use.
        `empty`: as if no model were loaded, which shows what fits at all, and how fast."""
        members, promises = self._cluster.members(), promises or {}
        if empty:
            members = [replace(member, stages=()) for member in members]
        facts = [
            replace(
                node_facts(m, placing, promises.get(m.id)), drafts=self.mtp_switch(m.id).enabled
            )
            for m in members
        ]
        nodes = lent(evened(with_kin_profiles(facts)))
        links = link_facts([member.facts for member in members])
        head = self._cluster.head or self._self
        return ClusterView(
            nodes=nodes,
            links=links,
            head=head,
            kv_bits=self._kv_bits(head, members),
            kv_refusals=tuple(
                (ModelId(refusal.model), refusal.reason)
                for member in members
                for refusal in member.facts.kv_refusals
            ),
        )

    def _kv_bits(self, head: NodeId, members: Sequence[MemberFacts]) -> int | None:
        """The head's setting, which holds while it is about to leave too."""
        facts = next((member.facts for member in members if member.id == head), None)
        if facts is None:
            reports = (report.facts for report in self._cluster.reports() if report.id == head)
            facts = next(reports, pb.NodeFacts())
        return chosen_bits(facts)

    def split_refusal(self, model: ModelId) -> SplitRefusal:
        """The strictest refusal among the nodes that checked whether the model may be split.

        An unchecked stage is checked when it is first loaded.
        """
        refusals_of_nodes = (
            refusal for member in self._cluster.members() for refusal in member.facts.split_refusals
        )
        refusals = [
            SplitRefusal(each.reason, frozenset(each.borders))
            for each in refusals_of_nodes
            if each.model == model
        ]
        return min(refusals, key=lambda each: len(each.borders), default=MAY_BE_SPLIT)

    async def card(self, model: ModelId) -> tuple[ModelCard, str]:
        """The card and its fingerprint. Raises ModelNotFound, InvalidCard and InvalidCheckpoint."""
        try:
            model_entry = await asyncio.to_thread(self._library.get, model)
        except ModelNotFound:
            if not self._is_held(model):
                raise
            return await self._fetcher.describe(model)
        if model_entry.folder is not None:
            checkpoint = await asyncio.to_thread(self._library.checkpoint, model_entry.folder)
            return model_entry.card, checkpoint.fingerprint
        if self._is_held(model):
            return model_entry.card, (await self._fetcher.describe(model))[1]
        return model_entry.card, ""

    async def drafter(
        self, card: ModelCard, name: str | None
    ) -> BlockDrafter | Literal["none"] | None:
        """The block drafter that a placement of the card's model names. Raises InvalidRequest."""
        if name is None or name == "none":
            return name
        return await asyncio.to_thread(self._library.drafters.choose, card, name)

    def _is_held(self, model: ModelId) -> bool:
        return any(model in member.facts.models for member in self._cluster.members())

    async def require_files(self, model: ModelId) -> None:
        """Requires a model on a disk. Raises ModelNotFound with the command that gets it."""
        if self.auto_download or self._is_held(model):
            return
        if (await asyncio.to_thread(self._library.get, model)).folder is None:
            raise ModelNotFound(not_here(model), param="model")

    def mtp_switch(self, generator: NodeId) -> EnabledState:
        """The generator's variable wins; where it has none, this node's page or default holds."""
        if generator != self._self:
            facts = self._facts_of(generator)
            if facts is not None and facts.native_mtp_variable:
                on = facts.native_mtp_variable == "1"
                source = f"EXO_NATIVE_MTP_ENABLED={int(on)} on {facts.name}"
                return EnabledState(on, source)
            if self._switches.fixed("native_mtp_enabled") is not None:
                return EnabledState(True)
        return self._switches.mtp()

    def stage_settings(self, generator: NodeId) -> StageSettings:
        facts = self._facts_of(generator)
        if facts is None:
            return StageSettings()
        async_eval, adaptive = facts.async_draft_eval, facts.adaptive_draft
        if generator == self._self:
            async_eval = self._switches.value("native_mtp_async_draft_eval")
            adaptive = self._switches.value("native_mtp_adaptive")
        default_k = facts.default_draft_tokens
        return StageSettings(async_eval, adaptive, default_k)

    def _facts_of(self, node: NodeId) -> pb.NodeFacts | None:
        return next((m.facts for m in self._cluster.members() if m.id == node), None)


def remaining_bytes(
    memory: int, promises: Mapping[ModelId, int], used: Mapping[ModelId, int]
) -> int:
    """Bytes of a node that other models leave: each takes what it was promised, or more if it does.

    What nodes report lags behind: a stage that loads holds nothing yet, and a context that no
    request has filled is not in use. `promises` and `used` are of the other models, headroom
    included.
    """
    used_bytes = sum(
        max(promises.get(model, 0), used.get(model, 0)) for model in {*promises, *used}
    )
    return max(0, memory - used_bytes)


def node_facts(
    member: MemberFacts, placing: ModelId, promises: Mapping[ModelId, int] | None = None
) -> NodeFacts:
    """Memory is what other models leave of it; `promises` is what they may take here."""
    f = member.facts
    times, profile = _times(f, placing), None
    if times is not None and times.decode_s:
        profile = LayerProfile(
            times.decode_s,
            times.verify_s,
            times.prefill_s,
            times.tail_s,
            times.mtp_speedup,
            times.verify_rows,
        )
    used: dict[ModelId, int] = {}
    for stage in member.stages:
        took = int((stage.weight_bytes + stage.cache_bytes) * STAGE_HEADROOM)
        model = ModelId(stage.model)
        used[model] = used.get(model, 0) + took
    others = {model: size for model, size in (promises or {}).items() if model != placing}
    _ = used.pop(placing, None)
    return NodeFacts(
        id=member.id,
        name=f.name,
        memory_bytes=remaining_bytes(f.memory_bytes, others, used),
        memory_bandwidth=f.memory_bandwidth,
        backend=f.backend,
        chip=f.chip,
        models=frozenset(ModelId(model) for model in f.models),
        profile=profile,
        measured=measured_layers(f.profiles),
        prefill_s=times.prefill_s * MOST / max(1, times.prefill_rows) if times else 0.0,
        profile_dtype=times.dtype if times else "",
        reads=f.reads,
        keeps_readers=f.keeps_readers,
        reads_any=f.reads_any,
        chunk_limit=limit_of(times.chunk_limit, times.chunk_fault) if times else None,
        dtype=f.dtype if f.dtype in BYTES else "auto",
        float32_products=f.float32_products,
    )


def _times(facts: pb.NodeFacts, model: ModelId) -> pb.LayerTimes | None:
    """The node's last measurement of that model."""
    latest = reversed(facts.profiles)
    return next((times for times in latest if times.model == model and _are_times(times)), None)


def measured_layers(profiles: Iterable[pb.LayerTimes]) -> tuple[MeasuredLayer, ...]:
    """The smallest and the largest layer that a node measured in each dtype."""
    layers = sorted(
        MeasuredLayer(times.layer_bytes, times.decode_s, times.dtype)
        for times in profiles
        if times.layer_bytes and times.decode_s and _are_times(times)
    )
    smallest = {layer.dtype: layer for layer in reversed(layers)}
    largest = {layer.dtype: layer for layer in layers}
    return tuple(sorted({*smallest.values(), *largest.values()}))


def _are_times(times: pb.LayerTimes) -> bool:
    """Whether the measurement, which is another node's, has times at all."""
    figures = (times.decode_s, times.verify_s, times.prefill_s, times.tail_s)
    is_long = times.decode_s == 0 or times.decode_s >= SHORTEST_S
    return is_long and all(0 <= figure < NO_TIME_S for figure in figures)


def with_kin_profiles(nodes: Sequence[NodeFacts]) -> tuple[NodeFacts, ...]:
    """Nodes of one chip and backend share the least of each time that any of them measured.

    So a node that never loaded the model is not weighed by its data sheet against its twin's
    measurement; and what else ran during a measurement only ever adds to it.
    """
    kin: dict[tuple[str, str, str], list[LayerProfile]] = {}
    dtypes: dict[tuple[str, str], str] = {}
    for node in nodes:
        if node.profile is not None and node.chip:
            kin.setdefault(_kind(node), []).append(node.profile)
            dtypes[node.chip, node.backend] = node.profile_dtype
    shared = {kind: _least(profiles) for kind, profiles in kin.items()}

    def with_measured(node: NodeFacts) -> NodeFacts:
        dtype = node.profile_dtype or dtypes.get((node.chip, node.backend), "")
        node = replace(node, profile_dtype=dtype)
        return replace(node, profile=shared.get(_kind(node), node.profile))

    return tuple(map(with_measured, nodes))


def _kind(node: NodeFacts) -> tuple[str, str, str]:
    return node.chip, node.backend, node.profile_dtype


def _least(profiles: Sequence[LayerProfile]) -> LayerProfile:
    most = max(profile.verify_rows for profile in profiles)
    rows = (
        p if p.verify_rows == most else replace(p, verify_s=0.0, verify_rows=0) for p in profiles
    )
    columns = zip(*(astuple(profile) for profile in rows), strict=True)
    return LayerProfile(*(min((s for s in times if s > 0), default=0) for times in columns))
