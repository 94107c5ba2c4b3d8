"""Loads a stage by its specification, on the compute thread."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from mlx import nn

from ...mtp.caches.rollback import fixed_kinds
from ...mtp.families.family import Family
from ...mtp.families.head import DraftHead, HeadSource, HeadUnusable
from ...mtp.families.placed_rope import place_ropes
from ...mtp.families.table import family_of
from ...mtp.families.weights import load_head
from ...placement.config import hidden_size, vocabulary_size
from ...placement.errors import InvalidCheckpoint, LoadFailed
from ...placement.kv_bits import source_of
from ...proto import peer_pb2 as pb
from ..checkpoint.checkpoint import Checkpoint, read_checkpoint
from ..checkpoint.drafters import DrafterUnusable
from ..checkpoint.embedders import require_positions
from ..checkpoint.head_tensors import HeadMissing, find_head
from ..checkpoint.vision import Vision, vision_of
from ..kernels.install import install
from ..kernels.trial import KernelChoice
from .block_drafter import BlockDrafter, load_block_drafter
from .draft_pair import DraftPair, own_head
from .fusing import prepare_fusing
from .open_model import (
    backbone_is_raw,
    head_arrays,
    open_model,
    parameters_of,
    read_layers,
    require_layers,
)
from .split_check import require_splittable
from .stage_limits import StageLimits
from .stage_model import KvQuantisation, StageModel
from .stored_rows import StoredRows
from .tensors import DTYPES
from .tower import Tower, load_tower, placed_positions

if TYPE_CHECKING:
    from ..text.codec import TextCodec

log = logging.getLogger(__name__)
Report = Callable[[pb.LoadProgress], None]


def _unknown(_first: int, _end: int) -> None:
    raise LoadFailed("it is not known whether parts of this model compute the same")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A stage in memory.

    Only a generator of answers has `codec`, and it may have `head`; `head_state` is the reason if
    it has none.
    """

    model: StageModel
    expected: StageLimits
    codec: "TextCodec | None" = None
    head: Any = None
    """A `DraftHead`, a `BlockDrafter` or a `DraftPair`, or None."""
    head_state: str = ""
    tower: Tower | None = None
    """The vision tower, or None for the reason `images`."""
    images: str = ""
    weight_bytes: int = 0
    head_bytes: int = 0
    checkpoint_bytes_read: int = 0
    fingerprint: str = ""
    """The hash of config.json and the safetensors headers, or "" without a checkpoint."""
    require_splittable: Callable[[int, int], None] = _unknown
    """Raises LoadFailed for layers [first, end) that do not compute the same as in the whole
    model."""
    kernels: tuple[KernelChoice, ...] = ()
    """The kernels of the layers and the reasons for them, on CUDA and CPUs; else empty."""


LEAST_KEPT: Final = 1 << 28
"""Bytes of freed memory that MLX may keep on Metal however small a plan is."""


def load(spec: pb.StageSpec, report: Report, *, fuses: bool = True) -> Loaded:
    """Checks the checkpoint, then reads this stage's tensors and, if asked, the draft head's.

    `fuses`: whether operations are fused from now on, or by `LaterFusing`. Raises
    InvalidCheckpoint, LoadFailed, and InvalidCard if the model's hidden size is unknown.
    """
    limit_memory(spec.memory_limit_bytes)
    if fuses:
        prepare_fusing()
    else:
        mx.disable_compile()
    loaded = _load(spec, report)
    limit_cache(spec.memory_limit_bytes)
    return loaded


def _load(spec: pb.StageSpec, report: Report) -> Loaded:
    checkpoint = read_checkpoint(Path(spec.path))
    _require_same(spec, checkpoint)
    generator = spec.stage == 0
    read_before = bytes_read()
    require_positions(checkpoint.config, spec.context_length)
    # First: a split cannot help an unknown architecture.
    model = open_model(checkpoint.folder, pooling=spec.pooling)
    require_layers(model, spec.first_layer, spec.end_layer)
    if spec.num_stages > 1 or spec.first_layer:
        report(pb.LoadProgress(step="checking that it can be split"))
        first, end = spec.first_layer, spec.end_layer
        require_splittable(checkpoint.config, first, end, spec.profile_folder)
    dtype = DTYPES[spec.dtype]
    weight_bytes = read_layers(
        model,
        spec.first_layer,
        spec.end_layer,
        dtype,
        outer=generator,
        progress=lambda done, total: report(
            pb.LoadProgress(step="reading", done=done, total=total)
        ),
    )
    kv = KvQuantisation(spec.kv_bits, spec.kv_group_size) if spec.kv_bits else None
    vision = vision_of(checkpoint.config)
    positions = placed_positions(model, vision)
    stage = StageModel(model, spec.first_layer, spec.end_layer, kv, positions)
    limits = _limits(spec, checkpoint.config, vision)
    stage.check_quantised(limits.hidden_size, dtype, source_of(spec.kv_bits_source))
    if spec.num_stages > 1 or spec.first_layer:
        stage.require_width(limits.hidden_size)
    head, head_state, head_bytes = None, spec.mtp_off_reason, 0
    if generator and spec.native_mtp:
        head, head_state = _load_head(spec, checkpoint, stage, dtype, limits)
        parts = head[1:] if isinstance(head, DraftPair) else [head] if head else []
        modules = [part.module if isinstance(part, BlockDrafter) else part for part in parts]
        head_bytes = sum(p.nbytes for module in modules for p in parameters_of(module))
    tower, images = None, ""
    if generator:
        tower, images = load_tower(checkpoint, vision, dtype, spec.end_layer)
    read = bytes_read() - read_before
    kernels = _choose_kernels(spec, stage, head, report, checkpoint.fingerprint, limits)
    return Loaded(
        model=stage,
        expected=limits,
        codec=_codec(Path(spec.path)) if generator and not spec.pooling else None,
        head=head,
        head_state=head_state,
        tower=tower,
        images=images,
        weight_bytes=weight_bytes + (tower.bytes if tower is not None else 0),
        head_bytes=head_bytes,
        checkpoint_bytes_read=read,
        fingerprint=checkpoint.fingerprint,
        kernels=kernels,
        require_splittable=lambda first, end: require_splittable(
            checkpoint.config, first, end, spec.profile_folder
        ),
    )


def _require_same(spec: pb.StageSpec, checkpoint: Checkpoint) -> None:
    """The generator must have the same revision of the model. Raises InvalidCheckpoint."""
    if spec.checkpoint_sha256 and spec.checkpoint_sha256 != checkpoint.fingerprint:
        raise InvalidCheckpoint(
            f"{checkpoint.folder.name} differs from the generator's copy of {spec.model}: its "
            "config.json or safetensors headers are not the same; download the same revision"
        )


def _codec(folder: Path) -> "TextCodec":
    from ..text.codec import TextCodec  # transformers, more than a second: a generator's only

    return TextCodec.load(folder)


def _choose_kernels(
    spec: pb.StageSpec,
    stage: StageModel,
    head: Any,
    report: Report,
    fingerprint: str,
    limits: StageLimits,
) -> tuple[KernelChoice, ...]:
    parts: list[nn.Module] = stage.own_layers
    family = family_of(stage.model) if spec.stage == 0 else None
    own = (family.output if family else None, own_head(head))
    parts += [part for part in own if isinstance(part, nn.Module)]
    mode = "mlx" if spec.kernels == "mlx" else "auto"
    stored = StoredRows(spec.profile_folder, fingerprint)
    earlier = stored.read()
    rows = dict(earlier)

    def two_rows() -> mx.array:
        hidden = mx.zeros((1, 2, limits.hidden_size), DTYPES[spec.dtype])
        return stage.hidden(mx.zeros((1, 2), mx.int32), hidden, stage.make_caches())

    choices = install(
        stage.model,
        parts,
        mode,
        lambda step: report(pb.LoadProgress(step=step)),
        [] if spec.pooling else stage.own_modules(outer=spec.stage == 0),
        DTYPES[spec.dtype],
        rows,
        None if spec.pooling else two_rows,
    )
    if rows != earlier:
        stored.write(rows)
    return choices


def _load_head(
    spec: pb.StageSpec,
    checkpoint: Checkpoint,
    stage: StageModel,
    dtype: mx.Dtype,
    limits: StageLimits,
) -> tuple[Any, str]:
    """The draft head, the drafter or both, and "loaded" or the reason why there is none."""
    if not spec.drafter:
        return _load_own_head(spec, checkpoint, stage, dtype)[1:]
    try:
        drafter = load_block_drafter(spec, stage, limits, dtype)
    except DrafterUnusable as fault:
        if spec.drafter_required:
            raise InvalidCheckpoint(
                f"{fault}, or load the model without --drafter", param="drafter"
            ) from fault
        return None, str(fault)
    if not spec.mtp_hidden:
        return drafter, "loaded"
    family, head, state = _load_own_head(spec, checkpoint, stage, dtype)
    if family is None or head is None:
        log.warning("%s drafts alone: %s", spec.drafter, state)
        return drafter, "loaded"
    return DraftPair(family, head, drafter), "loaded"


def _load_own_head(
    spec: pb.StageSpec, checkpoint: Checkpoint, stage: StageModel, dtype: mx.Dtype
) -> tuple[Family | None, DraftHead | None, str]:
    """The checkpoint's own head and its family, and "loaded" or the reason why there is none."""
    family = _family(spec, stage)
    if isinstance(family, str):
        return None, None, family
    tensors = find_head(checkpoint)
    if isinstance(tensors, HeadMissing):
        return None, None, tensors.reason
    source = HeadSource(head_arrays(checkpoint, tensors), backbone_is_raw(checkpoint, tensors))
    try:
        head = load_head(family, source, dtype)
    except HeadUnusable as fault:
        return None, None, str(fault)
    place_ropes(head, stage.rope_positions)
    return family, head, "loaded"


def _family(spec: pb.StageSpec, stage: StageModel) -> Family | str:
    """The model's family with the card's kind of input, or the reason why it cannot draft."""
    usual = family_of(stage.model)
    if usual is None:
        return f"no draft head is implemented for {type(stage.model).__module__}"
    if spec.mtp_hidden not in usual.hidden_kinds:
        kinds = " or ".join(repr(kind) for kind in usual.hidden_kinds)
        return (
            f"the card's native_mtp.hidden is {spec.mtp_hidden!r} but this family's head is fed "
            f"{kinds}; correct the card"
        )
    if kinds := fixed_kinds(stage.make_caches()):
        return (
            f"rows cannot be taken back from this model's caches ({', '.join(kinds)}), so drafts "
            "cannot be verified; remove [native_mtp] from the card"
        )
    return type(usual)(stage.model, spec.mtp_hidden)


def _limits(spec: pb.StageSpec, config: Mapping[str, Any], vision: Vision | None) -> StageLimits:
    """The limits of frames. The card's sizes win: config.json may have them under unknown names."""
    return StageLimits(
        placement=spec.placement,
        # Frames for the generator carry the number after the last stage's.
        stage=spec.stage or spec.num_stages,
        dtype=spec.dtype,
        hidden_size=spec.hidden_size or hidden_size(config),
        max_rows=max(spec.prefill_chunk, vision.image_rows if vision is not None else 0),
        context_length=spec.context_length,
        vocabulary=spec.vocabulary or vocabulary_size(config),
        kv_bits=spec.kv_bits,
        dtype_reason=spec.dtype_reason,
    )


def limit_memory(limit_bytes: int) -> None:
    """Limits what MLX keeps and builds ahead on CUDA; 0: no limit.

    Beyond the limit operations wait for each other. A CPU ran at a fifth of its speed so; nobody
    has measured a Mac, which `limit_cache` serves.
    """
    if limit_bytes and mx.cuda.is_available():
        mx.set_memory_limit(limit_bytes)
    if mx.metal.is_available():
        # mlx-lm does the same: weights that macOS may page out make every token wait for the disk.
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))


def limit_cache(limit_bytes: int) -> None:
    """Limits the freed memory that MLX keeps on Metal to what the limit leaves beside weights that
    are loaded; 0: no limit."""
    if limit_bytes and mx.metal.is_available():
        mx.set_cache_limit(max(limit_bytes - mx.get_active_memory(), LEAST_KEPT))


def bytes_read() -> int:
    """Bytes that this process's threads have read from files; 0 where the system does not count
    them (macOS).

    The system's count for the process includes ended children: a compiler reads more than a small
    checkpoint.
    """
    total = 0
    for counters in Path("/proc/self/task").glob("*/io"):
        with suppress(OSError):  # the thread has ended meanwhile
            total += int(counters.read_text().split()[1])  # "rchar: N"
    return total
