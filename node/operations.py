"""The operations API of a running node: its state, and what a user may change."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, get_args

from ..placement.card import ModelCard
from ..placement.cluster import ClusterView
from ..placement.drafting import HeadState, choose_drafting
from ..placement.errors import ModelNotFound
from ..placement.ids import ModelId, NodeId, PlacementId
from ..placement.plan import Placement, Preview, planned_bytes, preview
from ..placement.reader_choice import ExpectedReaders, expected_readers
from .api.operations.plan_request import PlacementBody, PlanBody
from .chat.metrics import CONTENT_TYPE, Metrics
from .chat.scrape import NodeState
from .cluster.desired import Desired
from .cluster.membership import Status as NodeStatus
from .local_node import LocalNode
from .machine.own_command import own_command
from .machine.switches import Name, Value
from .model_list import ModelList
from .peering import PeerWiring
from .placements.loaded_placement import LoadedPlacement
from .placements.loaded_placement import Status as PlacementStatus
from .placements.observations import promised
from .placements.placements import Placements
from .placements.planner_view import NodeFactsSource
from .store.sources import TransferEstimate, estimate_transfers
from .trust.api_tokens import ApiTokens
from .trust.certificates import clock_trouble


class NodeOperations:
    """`operations_api.Operations` over the running node."""

    def __init__(
        self,
        local: LocalNode,
        peering: PeerWiring,
        placements: Placements,
        facts: NodeFactsSource,
        metrics: Metrics,
        tokens: ApiTokens,
    ) -> None:
        self._local = local
        self._peering = peering
        self._cluster = peering.cluster
        self._placements = placements
        self._facts = facts
        self._metrics = metrics
        self._tokens = tokens
        self.model_list = self._models = ModelList(
            local.library, placements, self._cluster, facts, int(time.time())
        )

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": await self._models.on_disk()}

    async def no_model(self, model: str) -> ModelNotFound:
        return await self._models.no_model(ModelId(model))

    async def catalogue(self) -> dict[str, Any]:
        return {"object": "list", "data": await self._models.catalogue()}

    async def cluster(self) -> dict[str, Any]:
        # Without a token that is accepted, or without a network, the node is ready all the same.
        others = (self._tokens.trouble, self._local.network.trouble)
        trouble = "; ".join(filter(None, (self._trouble(), *others)))
        own = {"trouble": trouble or None, "offline": self._local.library.offline_by or None}
        names = {
            "cluster": self._local.keyring.fingerprint,
            "version": self._local.version,
            "command": own_command(),
        }
        return self._cluster.describe() | names | own

    def _trouble(self) -> str:
        """The things that this node cannot do now, and why; "" where there is nothing."""
        own = (self._cluster.trouble(), self._local.loops.trouble())
        return "; ".join(filter(None, (*own, clock_trouble(datetime.now(UTC)))))

    async def reach(self) -> dict[str, Any]:
        return await self._peering.search.reach()

    async def profile(self) -> Mapping[str, Any]:
        return self._local.profiling.describe()

    async def placements(self) -> dict[str, Any]:
        data = [self._placement(record) for record in self._placements.records]
        return {"object": "list", "data": data}

    async def preview(self, body: PlanBody) -> dict[str, Any]:
        """Plans without loading. Raises what `place` would."""
        model = ModelId(body.model)
        card, _ = await self._facts.card(model)
        view = self._facts.view(model, promised(self._placements.runners))
        drafter = await self._facts.drafter(card, body.drafter)
        options, refusal = body.options(view.nodes, drafter), self._facts.split_refusal(model)
        card = options.apply(card)
        # Tenths of a second for many nodes: not on the event loop.
        choice = await asyncio.to_thread(preview, card, view, options, pipeline_refusal=refusal)
        transfers = [
            estimate_transfers(card, placement.stages, view)
            for placement in (choice.best, choice.runner_up)
            if placement is not None
        ]
        reply = preview_json(card, choice, view, self._drafts(card, choice), transfers)
        readers = expected_readers(card, choice.best, view, self._copies(card.id, choice.best))
        return reply | reading_json(readers, view) | {"refusal": await self._refusal(model)}

    def _copies(self, model: ModelId, planned: Placement) -> set[NodeId]:
        """The nodes that hold the whole model now; none if the planned one is not among them."""
        copies = {
            record.generator.node
            for record in self._placements.records
            if record.card.id == model and record.status == "ready" and len(record.stages) == 1
        }
        return copies if planned.stages[0].node in copies else set()

    async def _refusal(self, model: ModelId) -> str | None:
        """Why a load would be refused although there is a place for it."""
        try:
            await self._facts.require_files(model)
        except ModelNotFound as fault:
            return fault.message
        return None

    async def place(self, body: PlacementBody) -> dict[str, Any]:
        """Plans and loads. Raises ModelNotFound if no node has the model or may download it."""
        model = ModelId(body.model)
        await self._facts.require_files(model)
        card, _ = await self._facts.card(model)
        drafter = await self._facts.drafter(card, body.drafter)
        options = body.options(self._facts.view(model).nodes, drafter)
        desired = self._placements.desired.get(model)
        if body.is_count and desired is not None:
            options = desired.options
        auto = body.replicas == "auto"
        if body.replicas != "auto":
            replicas = body.replicas
        else:
            replicas = 1 if desired is None else desired.replicas  # idle ones go by themselves
        record = await self._placements.place(model, options, replicas, auto_replicas=auto)
        return self._placement(record)

    async def unplace(self, placement: str) -> None:
        await self._placements.remove(PlacementId(placement))

    async def settings(self) -> dict[str, Any]:
        return self._local.switches.describe()

    async def change_settings(self, changes: Mapping[Name, Value]) -> dict[str, Any]:
        self._local.switches.change(changes)
        return self._local.switches.describe()

    async def ready(self) -> tuple[bool, str]:
        """Whether this node can answer, or why not."""
        if trouble := self._trouble():
            return False, trouble
        if self._cluster.head is None:
            return False, "no head is elected yet"
        for record in self._placements.records:
            if record.status != "ready":
                why = record.error or record.step or record.why
                return False, f"{record.card.id} is {record.status}" + (f": {why}" if why else "")
        if not self._placements.records:
            return True, "no model is loaded here; one is loaded when it is first asked for"
        return True, ""

    async def mtp_stats(self) -> dict[str, Any]:
        return {"models": self._metrics.totals.describe()}

    async def metrics(self) -> tuple[bytes, str]:
        return self._metrics.render(self._state()), CONTENT_TYPE

    async def version(self) -> dict[str, Any]:
        return {"name": "exo-node", "version": self._local.version}

    def _drafts(self, card: ModelCard, choice: Preview) -> str:
        """Why the model would draft where it would be placed, or why not."""
        stages = choice.best.stages
        switch = self._facts.mtp_switch(stages[0].node)
        drafting = choose_drafting(card, len(stages), HeadState(True), switch, None)
        if drafting.kind != "none":
            return choice.drafting
        copies = "; copied drafts need no head: a load measures whether they are exact"
        return drafting.reason + copies * (len(stages) == 1)

    def _state(self) -> NodeState:
        nodes = self._cluster.describe()["nodes"]
        node_counts = Counter(str(node["status"]) for node in nodes)
        placement_counts = Counter(record.status for record in self._placements.records)
        return NodeState(
            version=self._local.version,
            nodes={status: node_counts[status] for status in get_args(NodeStatus)},
            placements={status: placement_counts[status] for status in get_args(PlacementStatus)},
            runners=self._cluster.reports()[0].stages,
            gpu_faults=self._local.profiling.gpu_faults,
        )

    def _placement(self, record: LoadedPlacement) -> dict[str, Any]:
        stages: list[dict[str, Any]] = [
            {
                "node": stage.node,
                "layers": [stage.first_layer, stage.end_layer],
                "status": record.status,
            }
            for stage in record.stages
        ]
        for stage, endpoint in zip(stages, record.endpoints, strict=False):
            stage["weight_bytes"] = endpoint.ready.weight_bytes
            stage["checkpoint_bytes_read"] = endpoint.ready.checkpoint_bytes_read
            stage["pid"] = endpoint.ready.pid
        return {
            "id": record.id,
            "model": record.card.id,
            "status": record.status,
            "progress": record.step,
            "reason": record.plan.reason,
            "moved": record.moved or None,
            "runner_up": record.plan.runner_up,
            "error": record.error or None,
            "context_length": record.plan.context_length,
            "prefill_chunk": record.plan.prefill_chunk,
            "dtype": record.plan.dtype,
            "dtype_reason": record.plan.dtype_reason,
            "kv_bits": record.plan.kv_bits.bits or None,
            "kv_bits_reason": record.plan.kv_bits.reason,
            **self._speed(record),
            "stages": stages,
            "readers": self._readers(record),
            "answers": record.activity.requests,
            **self._replicas(record.card.id),
            "drafting": self._drafting(record),
        }

    def _speed(self, record: LoadedPlacement) -> dict[str, Any]:
        """The field `fits` of the list of models; empty for an embedder."""
        speed = None if record.card.embeds else self._models.speed(record)
        return {
            "tokens_per_second": speed and speed.tokens_per_second,
            "estimated": speed and not speed.is_measured,
        }

    def _replicas(self, model: ModelId) -> dict[str, Any]:
        """The options that hold for a model, how many replicas are desired, why there are fewer."""
        desired = self._placements.desired.get(model) or Desired(model)
        return {
            "asked_for": desired.options.describe(self._facts.name) or None,
            "replicas": desired.replicas,
            "auto_replicas": desired.auto_replicas,
            "replicas_missing": self._placements.missing_replica(model) or None,
        }

    def _readers(self, record: LoadedPlacement) -> list[dict[str, Any]]:
        """The runners that only read prompts for it."""
        placement = record.placement
        return [
            {
                "node": runner.key.node,
                "node_name": self._facts.name(runner.key.node),
                "layers": [runner.plan.reader[0].first_layer, runner.plan.reader[0].end_layer],
                "status": runner.state,
                "memory_bytes": runner.memory,
            }
            for runner in (() if placement is None else placement.others)
            if runner.is_reader and runner.plan.reader is not None
        ]

    def _drafting(self, record: LoadedPlacement) -> dict[str, Any]:
        if not record.endpoints:
            return {
                "drafter_kind": "none",
                "num_draft_tokens": 0,
                "draft_policy": "none",
                "reason": "not loaded",
                "depth_reason": "",
                "prompt_lookup": None,
            }
        switch = self._facts.mtp_switch(record.generator.node)
        stages = len(record.stages)
        settings = self._facts.stage_settings(record.generator.node)
        drafting = choose_drafting(
            record.card,
            stages,
            self._models.head(record),
            switch,
            None,
            adaptive=settings.adaptive_draft,
            default_k=settings.default_k,
        )
        drafts = drafting.kind != "none"
        begins = f"begins with K = {drafting.initial_k}: {drafting.reason}"
        return {
            "drafter_kind": (self._models.drafter_kind(record) or drafting.kind)
            if drafts
            else "none",
            "num_draft_tokens": drafting.k,
            "draft_policy": ("adaptive" if drafting.adaptive else "fixed") if drafts else "none",
            "reason": "" if drafts else drafting.reason,
            "depth_reason": (self._models.depth_reason(record) or begins) if drafts else "",
            "prompt_lookup": self._models.prompt_lookup(record),
        }


def preview_json(
    card: ModelCard,
    choice: Preview,
    view: ClusterView,
    drafting: str,
    transfers: Sequence[Sequence[TransferEstimate]] = ((), ()),
) -> dict[str, Any]:
    """The body of `GET /v1/placements/preview`; `drafting`: why the model drafts, or not.

    `transfers`: what each of the two placements has to copy or download.
    """
    runner_up = choice.runner_up
    return {
        "object": "placement.preview",
        "model": choice.best.model,
        "best": _placed_stages(card, choice.best, view, transfers[0]),
        "runner_up": runner_up and _placed_stages(card, runner_up, view, transfers[1]),
        "bound_s": choice.bound_s,
        "proven": choice.bound_s >= choice.best.score,
        "candidates_considered": choice.candidates_considered,
        "drafting": drafting,
    }


def reading_json(readers: ExpectedReaders, view: ClusterView) -> dict[str, Any]:
    """The fields of a preview that say who reads long prompts, from which length, and why."""
    return {
        "readers": [
            {
                "node": each.node,
                "name": view.node(each.node).name,
                "layers": [each.first_layer, each.end_layer],
            }
            for each in readers.readers
        ],
        "readers_from_tokens": readers.rows or None,
        "read_reason": readers.reason,
    }


def _placed_stages(
    card: ModelCard, placement: Placement, view: ClusterView, transfers: Sequence[TransferEstimate]
) -> dict[str, Any]:
    return {
        "stages": [
            {
                "node": stage.node,
                "name": view.node(stage.node).name,
                "layers": [stage.first_layer, stage.end_layer],
                "memory_bytes": planned_bytes(card, placement, number),
                "memory_left_bytes": view.node(stage.node).memory_bytes,
            }
            for number, stage in enumerate(placement.stages)
        ],
        "seconds_per_token": placement.score,
        "context_length": placement.context_length,
        "prefill_chunk": placement.prefill_chunk,
        "dtype": placement.dtype,
        "dtype_reason": placement.dtype_reason,
        "kv_bits": placement.kv_bits.bits or None,
        "kv_bits_reason": placement.kv_bits.reason,
        "reason": placement.reason,
        "to_bring": [
            {
                "node": each.node,
                "name": view.node(each.node).name,
                "bytes": each.nbytes,
                "from": each.source,
                "seconds": each.seconds,
            }
            for each in transfers
        ],
    }
