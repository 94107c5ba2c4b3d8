"""This node by itself: keys, models, switches, measurements, and its facts for the others."""

import asyncio
import logging
import time
from collections.abc import Sequence
from importlib.metadata import version as installed_version

from ..placement.gpu_faults import GpuFault
from ..placement.ids import NodeId
from ..proto import peer_pb2 as pb
from .links.layer_profiles import LayerProfiles
from .links.measurements import Profiling
from .machine.events import EventLog
from .machine.hardware import Hardware
from .machine.interfaces import advertised_host, announced_addresses, own_interfaces
from .machine.local_network import LocalNetwork
from .machine.settings import Settings, models_folders
from .machine.switches import Switches
from .machine.tasks import Loops
from .machine.timing import PROFILES
from .rpc.link_rpc import LinkClient
from .store.library import KnownModel, ModelLibrary
from .store.listing import format_of
from .trust.cluster_key import Keyring

log = logging.getLogger(__name__)

_MAX_HEARTBEAT_MODELS = 500  # a heartbeat may be 4 MB


class LocalNode:
    """The parts of a node that need no other node: identity, settings, models, hardware, events."""

    def __init__(self, settings: Settings, hardware: Hardware) -> None:
        """Reads keys. Raises InvalidSettings where the data folder or the key cannot be used."""
        self.settings = settings
        self.timing = PROFILES[settings.timing]
        self.events = EventLog()
        self.loops = Loops(self.events, self.timing)
        self._hardware = hardware
        self._models: Sequence[pb.HeldModel] = ()
        self._reported_faults: set[tuple[str, str]] = set()
        self.version = installed_version("exo-node")
        self.keyring = Keyring.load(settings)
        self.switches = Switches.of(settings)
        self.network = LocalNetwork()
        self.library = ModelLibrary(
            models_folders(settings), offline=settings.offline, cards=settings.cards_dir
        )
        self.host, addresses = self._addresses()
        """The address that peers use first, and all of them."""
        profiles = LayerProfiles.of(settings.data_dir, hardware)
        client = LinkClient(self.keyring.credentials, time.perf_counter)
        self.profiling = Profiling(
            self.id, addresses, profiles, client, time.monotonic, self.timing
        )
        self.grpc_port, self.http_port = settings.grpc_port, settings.port
        """The requested ports until the node listens."""

    def note_gpu_fault(self, spec: pb.StageSpec, fault: GpuFault, is_measured: bool) -> None:
        """A GPU fault ended a runner of this node; `is_measured`: in a measurement, not an
        answer."""
        limit = self.profiling.limit_chunk(spec, fault, is_measured=is_measured)
        text = f"a GPU fault ({fault}) ended the runner of {spec.model}"
        if is_measured:
            text += " while it was measured"
        else:
            rest = f" at {spec.prefill_chunk} tokens of a prompt at a time"
            text += f": {limit}" if limit else rest
        rows = limit.rows if limit else spec.prefill_chunk
        _ = self.events.add(
            "gpu_fault", text, model=spec.model, stage=spec.stage, fault=fault, prefill_chunk=rows
        )

    def renew_addresses(self) -> None:
        """Takes up the addresses that this machine has now."""
        self.host, self.profiling.addresses = self._addresses()

    def _addresses(self) -> tuple[str, list[str]]:
        setting, interfaces = self.settings.interface, own_interfaces()
        host = advertised_host(setting, interfaces)
        return host, announced_addresses(host, setting is not None, interfaces)

    @property
    def id(self) -> NodeId:
        return self.keyring.identity.node

    @property
    def usable_bytes(self) -> int:
        """Bytes of this machine's memory that stages may take."""
        return self._hardware.usable_bytes

    def about(self) -> pb.NodeFacts:
        """The facts that nodes of other clusters receive; strangers may cause it often."""
        name, chip, v = self.settings.name, self._hardware.chip, self.version
        return pb.NodeFacts(name=name, chip=chip, version=v, host=self.host, port=self.grpc_port)

    def facts(self) -> pb.NodeFacts:
        """The facts of this node for a heartbeat, as a new message that callers may extend."""
        fixed_mtp = self.switches.fixed("native_mtp_enabled")
        facts = pb.NodeFacts(
            id=self.id,
            memory_bytes=self._hardware.usable_bytes,
            memory_bandwidth=self._hardware.bandwidth,
            backend=self._hardware.backend,
            models=[model.model for model in self._models],
            held_models=self._models[:_MAX_HEARTBEAT_MODELS],
            http_host=self.settings.host,
            http_port=self.http_port,
            dtype=self.settings.dtype,
            float32_products=self._hardware.products_with(self.settings.kernels),
            native_mtp_variable="" if fixed_mtp is None else str(int(fixed_mtp)),
            async_draft_eval=self.switches.value("native_mtp_async_draft_eval"),
            adaptive_draft=self.switches.value("native_mtp_adaptive"),
            default_draft_tokens=self.settings.native_mtp_default_k,
            kv_bits=self.settings.kv_bits,
            reads=self.settings.readers != "0",
            keeps_readers=self.settings.readers in ("1", "any"),
            reads_any=self.settings.readers == "any",
        )
        facts.MergeFrom(self.about())
        return self.profiling.add_to(facts)

    async def scan_models(self, every_s: float) -> None:
        """Scans this disk for models every `every_s` seconds; the facts contain them."""
        while True:
            await self.rescan()
            await asyncio.sleep(every_s)

    async def rescan(self) -> None:
        models = await asyncio.to_thread(self.library.scan)
        self._models = await asyncio.to_thread(self._describe_models, list(models.values()))
        for model, fault in self.library.broken.items():
            if (model, fault.message) not in self._reported_faults:
                self._reported_faults.add((model, fault.message))
                log.warning("model %s cannot be used: %s", model, fault)

    def _describe_models(self, models: Sequence[KnownModel]) -> Sequence[pb.HeldModel]:
        files = [self.library.file_facts(model) for model in models]
        return [
            pb.HeldModel(
                model=model.card.id,
                weight_bytes=model.card.weight_bytes,
                quantization=model.card.quantization or 0,
                format=format_of(model.card),
                context_length=model.card.context_length,
                head=model.card.drafts is not None and self.library.head(model).loaded,
                model_type=model.card.model_type,
                capabilities=facts.capabilities,
                digest=facts.digest,
                sampling=model.card.sampling.by_field,
                published_sampling=facts.sampling,
                kept_reason=self.library.kept_reason(model),
            )
            for model, facts in zip(models, files, strict=True)
        ]
