"""A model by name or folder, as a node on this machine alone would load it: for `verify`, `bench`.

A command that needs the model itself, not a running node, resolves it here and starts a child
process with the specification; the node's own process never imports mlx.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ...placement.card import ModelCard
from ...placement.cluster import ClusterView, NodeFacts
from ...placement.drafting import initial_depth
from ...placement.errors import InvalidCheckpoint, ModelNotFound
from ...placement.ids import ModelId, NodeId, PlacementId
from ...placement.library import not_here
from ...placement.options import PlanOptions
from ...placement.plan import plan, planned_bytes
from ...proto import peer_pb2 as pb
from ..links.layer_profiles import LayerProfiles
from ..machine.hardware import Hardware, detect_hardware
from ..machine.settings import Settings, models_folders, visible_gpus
from ..machine.switches import Switches
from ..machine.timing import PROFILES
from ..store.library import KnownModel, ModelLibrary
from .planner_view import measured_layers
from .stage_specs import StageSettings, build_specs, on_this_machine

_HERE = NodeId("here")
_PATH_STARTS = ("/", ".", "~")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine. `spec` is one stage of all layers, as `shard.load.load` takes it.

    `spec.native_mtp` is False where the node would not draft, because of `spec.mtp_off_reason`;
    whether the head's tensors are in the files is seen at load. `spec.profile_folder` is empty.
    """

    card: ModelCard
    folder: Path
    hardware: Hardware
    spec: pb.StageSpec
    initial_k: int
    """Drafts a round that adaptive K begins with; 0 where `spec.native_mtp` is False."""


def resolve(name: str, settings: Settings, distributions: Collection[str]) -> LocalModel:
    """The model called `name`, an id as `exo-node models` lists it or a folder. Blocks.

    `settings` come from `load_settings({"data_dir": …, "models_dirs": …, "dtype": …},
    environment())`, `distributions` from `installed_distributions()`. Nothing is downloaded.
    Raises ModelNotFound, InvalidCard, InvalidCheckpoint and InsufficientMemory.
    """
    model, library = _find(name, settings)
    card, folder = model.card, model.folder
    if folder is None:
        raise ModelNotFound(not_here(card.id), param="model")
    hardware = detect_hardware(distributions, settings.memory_limit, visible_gpus())
    fingerprint = library.checkpoint(folder).fingerprint
    spec = _spec(card, hardware, settings, fingerprint)
    spec = on_this_machine(spec, folder, settings, library.drafters.folder)
    initial_k = 0
    if card.drafts is not None and spec.native_mtp:
        initial_k, _ = initial_depth(card.drafts, settings.native_mtp_default_k)
    return LocalModel(card, folder, hardware, spec, initial_k)


def _find(name: str, settings: Settings) -> tuple[KnownModel, ModelLibrary]:
    """An id wins over a folder of the same name, unless `name` can only be a path."""
    library = ModelLibrary(
        models_folders(settings), offline=settings.offline, cards=settings.cards_dir
    )
    folder = Path(name).expanduser()
    if not name.startswith(_PATH_STARTS):
        try:
            return library.get(ModelId(name)), library
        except ModelNotFound:
            if not (folder / "config.json").is_file():
                raise
    folder = folder.resolve()
    if not (folder / "config.json").is_file():
        raise InvalidCheckpoint(
            f"{name} holds no config.json; name a folder with a model, or an id that "
            "`exo-node models` lists",
            param="model",
        )
    beside = ModelLibrary((folder.parent,), offline=settings.offline, cards=settings.cards_dir)
    return beside.get(ModelId(folder.name)), beside


def _spec(
    card: ModelCard, hardware: Hardware, settings: Settings, fingerprint: str
) -> pb.StageSpec:
    """The specification that `Placements` builds in a cluster of this machine alone."""
    switches = Switches.of(settings)
    chosen = plan(card, view_of(hardware, settings), PlanOptions(max_nodes=1))
    [spec] = build_specs(
        PlacementId("local"),
        card,
        chosen,
        StageSettings(
            switches.value("native_mtp_async_draft_eval"),
            switches.value("native_mtp_adaptive"),
            settings.native_mtp_default_k,
        ),
        switches.mtp(),
        fingerprint=fingerprint,
        lease_s=PROFILES[settings.timing].state_lease_s,
    )
    _ = spec.plan.stages.add(memory_bytes=planned_bytes(card, chosen, 0))
    return spec


def view_of(hardware: Hardware, settings: Settings) -> ClusterView:
    """A cluster of this machine alone, with what its node has measured."""
    measured = measured_layers(LayerProfiles.of(settings.data_dir, hardware).times())
    here = NodeFacts(
        id=_HERE,
        name="this machine",
        memory_bytes=hardware.usable_bytes,
        memory_bandwidth=hardware.bandwidth,
        backend=hardware.backend,
        chip=hardware.chip,
        measured=measured,
        dtype=settings.dtype,
        float32_products=hardware.products_with(settings.kernels),
    )
    return ClusterView(nodes=(here,), head=_HERE, kv_bits=settings.kv_bits)
