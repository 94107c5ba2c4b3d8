"""The lists of models that the node shows: what is on the cluster's disks, and the catalogue."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, get_args

from ..placement.card import Capability, ModelCard
from ..placement.cluster import ClusterView
from ..placement.drafting import HeadState, choose_drafting, initial_depth
from ..placement.errors import ExoNodeError, ModelNotFound
from ..placement.fitting import Fit, Speed, fit, speed_of
from ..placement.ids import ModelId
from ..placement.sampling_values import model_sampling
from ..proto import peer_pb2 as pb
from .cluster.cluster import Cluster
from .machine.setting_values import LONGEST
from .placements.loaded_placement import LoadedPlacement
from .placements.placements import Placements
from .placements.planner_view import NodeFactsSource
from .store.file_facts import FileFacts
from .store.library import KnownModel, ModelLibrary
from .store.listing import entry, facts, parameters, partial_entry, recommended

_FITS_KEPT: Final = 512
_NOBODY: Final = ModelId("")
_UNKNOWN: Final = ("context_length", "native_mtp", "prompt_lookup", "mtp", "fits")
"""Facts of an entry that need the card of a whole checkpoint."""


@dataclass(slots=True)
class ModelList:
    """The models in the shape of `GET /v1/models`."""

    _library: ModelLibrary
    _placements: Placements
    _cluster: Cluster
    _source: NodeFactsSource
    _created: int
    _fits: dict[object, Fit] = field(default_factory=dict[object, Fit])

    async def on_disk(self) -> list[dict[str, Any]]:
        """Every model on a disk of the cluster: this node's, then those that only others have."""
        models = await asyncio.to_thread(self._library.scan)
        own = [await self._entry(model) for model in models.values()]
        broken = [self._broken(*each) for each in self._library.broken.items()]
        listed = {*models, *self._library.broken}
        partial = self._library.partial
        others = self._elsewhere(listed, partial)
        listed |= {other["id"] for other in others}
        rest = [self._partial(id, size) for id, size in partial.items() if id not in listed]
        return self._with_peers_reasons([*own, *broken, *others, *rest])

    async def catalogue(self) -> list[dict[str, Any]]:
        """Every model that there is a card of; `recommended` counts the best for these nodes."""
        models = await asyncio.to_thread(self._library.catalogue)
        entries = [await self._entry(model) for model in models.values()]
        ranks = {entry["id"]: rank for rank, entry in enumerate(recommended(entries), 1)}
        return [{**entry, "recommended": ranks.get(entry["id"])} for entry in entries]

    def planner(self) -> Callable[[ModelCard], dict[str, Any]]:
        """A function, for any thread, that plans a model which is on no disk: its facts, where it
        would run (`fits`), and how fast on each node alone (`by_node`)."""
        view = self._source.view(_NOBODY, empty=True)

        def describe(card: ModelCard) -> dict[str, Any]:
            best = self._fit(card, view)
            planned = facts(card, best, FileFacts(card.capabilities))
            planned["fits"]["on"] = [view.node(node).name for node in best.on]
            alone = [(node, self._fit(card, replace(view, nodes=(node,)))) for node in view.nodes]
            by_node = [
                {
                    "node": node.name,
                    "fits": each.nodes > 0,
                    "tokens_per_second": round(1 / each.seconds, 1) if each.seconds else None,
                }
                for node, each in alone
            ]
            return {**planned, "context_length": card.context_length, "by_node": by_node}

        return describe

    def holders(self, model: ModelId) -> list[str]:
        """The names of the nodes that have the files, by their last heartbeats."""
        return [m.facts.name for m in self._cluster.members() if model in m.facts.models]

    async def no_model(self, model: ModelId) -> ModelNotFound:
        """The error for a model that is not on a disk of the cluster, as a chat with it has it."""
        return await asyncio.to_thread(self._library.absence, model)

    def head(self, record: LoadedPlacement) -> HeadState:
        """A placement's draft head as it was loaded, unless its runner does not use it."""
        refusal = self._generator(record).head_refusal
        return HeadState(False, refusal) if refusal else record.head

    def depth_reason(self, record: LoadedPlacement) -> str:
        """Why rounds draft as many tokens as they do at present; empty before the first round."""
        return self._generator(record).depth_reason

    def drafter_kind(self, record: LoadedPlacement) -> str:
        """The one of a head and a drafter that drafts; empty before its runner reported it."""
        return self._generator(record).drafter_kind

    def speed(self, record: LoadedPlacement) -> Speed | None:
        """The predicted speed where the model is loaded; None while a node of it is lost."""
        view = self._source.view(record.card.id, empty=True)
        return speed_of(record.card, view, record.stages, record.plan.dtype)

    def prompt_lookup(self, record: LoadedPlacement | None) -> dict[str, Any] | None:
        """Whether requests may copy drafts, and why none does; or None, as without a placement."""
        if record is None or not record.endpoints or not record.generator.ready.prompt_lookup:
            return None
        measured = self._generator(record).prompt_lookup or record.generator.ready.prompt_lookup
        return {"enabled": measured == "on", "reason": "" if measured == "on" else measured}

    def _identity(self, record: LoadedPlacement) -> str:
        """`greedy_identity` as it is measured by now."""
        return self._generator(record).greedy_identity or record.identity

    def _generator(self, record: LoadedPlacement) -> pb.StageState:
        """The state of a placement's generator by the last heartbeat; empty if it had none."""
        generator = record.generator.node
        states = (
            stage
            for member in self._cluster.members()
            for stage in member.stages
            if (member.id, stage.placement, stage.stage) == (generator, record.id, 0)
        )
        return next(states, pb.StageState())

    async def _entry(self, model: KnownModel) -> dict[str, Any]:
        view = self._source.view(model.card.id, empty=True)
        return await asyncio.to_thread(self._described, model, view)

    def _described(self, model: KnownModel, view: ClusterView) -> dict[str, Any]:
        card, record = model.card, self._record(model.card.id)
        head = self._library.head(model)
        nodes = self._holders(card.id, here=model.folder is not None)
        context = record.plan.context_length if record else card.context_length
        best = self._fit(card, view)
        if record is not None and (speed := self.speed(record)) is not None:
            best = replace(best, seconds=speed.seconds, is_measured=speed.is_measured)
        return {
            **self._named(card.id),
            **entry(self._library, model, head, best, nodes),
            "owned_by": card.repository.split("/")[0] if card.repository else "exo-node",
            "context_length": context,
            "loaded": record is not None,
            "unloads_in_s": self._unloads_in_s(record),
            "native_mtp": self._native_mtp(card, head, record),
            "prompt_lookup": self.prompt_lookup(record),
            "kept": self._library.kept_reason(model) or None,
        }

    def _with_peers_reasons(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The entries with `kept`: why no node deletes the model's files, or None."""
        reasons: dict[str, list[str]] = {}
        for member in self._cluster.members():
            if member.id != self._cluster.self_id:
                for files in filter(lambda files: files.kept_reason, member.facts.held_models):
                    reason = f"on {member.facts.name}: {files.kept_reason}"
                    reasons.setdefault(files.model, []).append(reason)
        for each in entries:
            own = [each["kept"]] if each.get("kept") else []
            refusals = [*own, *reasons.get(each["id"], [])]
            each["kept"] = refusals[0] if refusals and len(refusals) == len(each["nodes"]) else None
        return entries

    def _record(self, model: ModelId) -> LoadedPlacement | None:
        """A placement that is being restored has its model, and requests wait for it."""
        records = (r for r in self._placements.records if r.card.id == model)
        return next((r for r in records if r.status in ("ready", "restoring")), None)

    def _unloads_in_s(self, record: LoadedPlacement | None) -> float | None:
        """Seconds until it unloads, if it is not used meanwhile, or None if it stays."""
        if record is None:
            return None
        in_use = record.activity.requests > 0
        left_s = self._placements.desired.left_s(record.card.id, in_use=in_use)
        return None if left_s > LONGEST else round(left_s, 1)

    def _native_mtp(
        self, card: ModelCard, file_head: HeadState, record: LoadedPlacement | None
    ) -> dict[str, Any] | None:
        card = card if record is None else record.card
        mtp = card.drafts
        if mtp is None:
            return None
        head, stages, parked = file_head, 1, False
        generator = self._cluster.self_id
        if record is not None and record.endpoints:
            head, stages = self.head(record), len(record.stages)
            parked = bool(self._generator(record).head_parked)
            generator = record.generator.node
        switch = self._source.mtp_switch(generator)
        default_k = self._source.stage_settings(generator).default_k
        drafting = choose_drafting(card, stages, head, switch, None)
        return {
            "default_k": initial_depth(mtp, default_k)[0],
            "max_k": mtp.max_k,
            "weights": "found" if file_head.loaded else "missing",
            "drafter": card.drafter.model if card.drafter else None,
            "enabled": drafting.kind != "none",
            "reason": "" if drafting.kind != "none" else drafting.reason,
            "parked": parked,
            "greedy_identity": None if record is None else self._identity(record),
            "depth_reason": "" if record is None else self.depth_reason(record),
        }

    def _broken(self, model: ModelId, fault: ExoNodeError) -> dict[str, Any]:
        state = {"owned_by": "exo-node", "loaded": False, "downloaded": True}
        nothing = dict.fromkeys(_UNKNOWN)
        files = {"nodes": self._holders(model, here=True), "size_bytes": None, "format": None}
        return {**self._named(model), **state, **nothing, **files, "error": fault.message}

    def _partial(self, model: ModelId, size: int) -> dict[str, Any]:
        nothing = dict.fromkeys(_UNKNOWN)
        state = {"owned_by": "exo-node", "nodes": list[str](), "format": None}
        return {**self._named(model), **state, **nothing, **partial_entry(model, size)}

    def _elsewhere(
        self, listed: set[ModelId], partial: Mapping[ModelId, int]
    ) -> list[dict[str, Any]]:
        """Models that only other nodes have, from their heartbeats."""
        others: dict[ModelId, pb.HeldModel] = {}
        for member in self._cluster.members():
            if member.id == self._cluster.self_id:  # its last scan may be older than a deletion
                continue
            for remote in member.facts.held_models:
                if remote.model not in listed:
                    _ = others.setdefault(ModelId(remote.model), remote)
        entries = [self._remote_entry(model, remote) for model, remote in sorted(others.items())]
        here = ((entry, partial.get(entry["id"])) for entry in entries)
        return [e | ({} if size is None else {"partial_bytes": size}) for e, size in here]

    def _remote_entry(self, model: ModelId, remote: pb.HeldModel) -> dict[str, Any]:
        return {
            **self._named(model),
            "owned_by": model.partition("/")[0] if "/" in model else "exo-node",
            "context_length": remote.context_length,
            "loaded": self._record(model) is not None,
            "unloads_in_s": self._unloads_in_s(self._record(model)),
            "downloaded": True,
            "nodes": self._holders(model, here=False),
            "size_bytes": remote.weight_bytes,
            "quantization": remote.quantization or None,
            "parameters": parameters(remote.weight_bytes, remote.quantization, remote.format),
            "model_type": remote.model_type,
            "capabilities": [name for name in get_args(Capability) if name in remote.capabilities],
            "digest": remote.digest or None,
            "sampling": None
            if "embeddings" in remote.capabilities
            else model_sampling(remote.sampling, remote.published_sampling),
            "format": remote.format,
            "fits": None,
            "mtp": "head found" if remote.head else "no head",
            "native_mtp": None,
            "prompt_lookup": self.prompt_lookup(self._record(model)),
        }

    def _named(self, model: ModelId) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": self._created}

    def _holders(self, model: ModelId, *, here: bool) -> list[str]:
        return [
            member.facts.name
            for member in self._cluster.members()
            if (here if member.id == self._cluster.self_id else model in member.facts.models)
        ]

    def _fit(self, card: ModelCard, view: ClusterView) -> Fit:
        """Planning for many nodes takes tenths of a second, so an answer is kept."""
        nodes = tuple(replace(node, memory_bytes=node.memory_bytes >> 28) for node in view.nodes)
        key = (card, view.head, view.kv_bits, view.kv_refusal(card.id), nodes)
        if key not in self._fits:
            if len(self._fits) >= _FITS_KEPT:
                self._fits.clear()
            self._fits[key] = fit(card, view)
        return self._fits[key]
