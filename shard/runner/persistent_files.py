"""Files of this machine that outlive a runner: measurements of a model, and prefixes."""

import hashlib
import logging
import platform
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Final, cast

import mlx.core as mx

from ...placement.errors import ExoNodeError
from ...placement.reading import reading_key
from ...proto import peer_pb2 as pb
from ...proto.fields import changed
from ..checkpoint.checkpoint import sample_digest
from ..checkpoint.prefix_files import FORMAT
from ..engine.answers.draft_profile import DraftProfile, DraftProfileKey
from ..engine.attempts import Attempts
from ..engine.prefixes.disk import PrefixDisk
from ..kernels.install import used
from ..model.load import Loaded

_SOFTWARE: Final = ("exo-node", "mlx", "mlx-lm")
"""Packages that decide bits and costs: a new version is measured again."""

log = logging.getLogger(__name__)


def profile_of(spec: pb.StageSpec, loaded: Loaded) -> DraftProfile:
    """The measurements of adaptive drafting and of the probes, for this model on this machine; for
    the layers of a first stage, if it is split."""
    key = _key(spec, loaded)
    if spec.num_stages > 1:
        key = replace(key, checkpoint=f"{key.checkpoint}, layers up to {spec.end_layer}")
    return DraftProfile.open(spec.profile_folder, key, time.perf_counter)


def attempts_of(spec: pb.StageSpec, loaded: Loaded) -> Attempts:
    """The counts of failed measurements of a later stage, which has no profile."""
    if not spec.profile_folder:
        return Attempts()
    file = Path(spec.profile_folder) / _key(spec, loaded).file
    return Attempts(file.with_stem(f"{file.stem}-{spec.first_layer}-{spec.end_layer}"))


def fusing_key(spec: pb.StageSpec, loaded: Loaded) -> str:
    """The key of the functions that MLX compiles for this stage."""
    return repr((_key(spec, loaded), spec.first_layer, spec.end_layer))


def prefix_disk_of(spec: pb.StageSpec, loaded: Loaded) -> PrefixDisk | None:
    """The prefix cache on disk; None if it is off."""
    if not (spec.prefix_disk_bytes and spec.prefix_folder and spec.prefix_cache_bytes):
        return None
    # A fingerprint does not cover weights: changed files must not use old prefixes.
    files = sorted(Path(spec.path).glob("*.safetensors"))
    file_states = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    parts = _prefix_parts(spec, _key(spec, loaded), file_states)
    folder, caches = Path(spec.prefix_folder), loaded.model.make_caches
    return PrefixDisk(folder, repr(parts), spec.prefix_disk_bytes, caches, spec.model)


def shared_prefix_key(spec: pb.StageSpec, loaded: Loaded) -> str:
    """The key under which runners of other replicas may use this one's states, or "" if none may.

    It covers what the key on disk covers, with samples of the weights in place of the times of
    their files, which differ between machines, and what of the machine decides results. States of
    split models do not move. Reads some of the weights: not for the event loop.
    """
    if spec.num_stages > 1 or not spec.prefix_cache_bytes:
        return ""
    if spec.first_layer:  # a reader's caches are those of the whole model's upper layers
        spec = changed(spec, stage=0, first_layer=0, end_layer=spec.num_layers)
    try:
        weights = sample_digest(Path(spec.path))
    except (OSError, ExoNodeError) as fault:
        log.warning("states are not shared with other replicas: %s", fault)
        return ""
    key = _key(spec, loaded)
    model = FORMAT, _prefix_parts(spec, replace(key, device="", software=""), weights)
    machine = key.device, key.software, _processor()
    return reading_key(_hash(model), _hash(machine), any_kind=spec.reads_any)


def _hash(parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _prefix_parts(spec: pb.StageSpec, key: DraftProfileKey, weights: object) -> tuple[object, ...]:
    """Everything but the ids that decides the bits of a prefix. `weights` separates those whose
    headers are alike."""
    # The rows that reach a stage have the bits of the machines and layers before it.
    before = [(each.node, each.end_layer) for each in spec.plan.stages[: spec.stage]]
    return (
        version("exo-node"),  # its kernels and its forwards
        key,
        (spec.mtp_hidden, spec.prefill_chunk, spec.kv_group_size),
        (spec.first_layer, spec.end_layer, before),
        weights,
        spec.reads_any,  # states may be those of another kind of machine
    )


def _processor() -> tuple[str, ...]:
    """Kinds of processors on which a library may compute by other instructions."""
    try:
        flags = Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0]
    except OSError:  # not Linux
        flags = ""
    system = platform.system(), platform.machine(), platform.mac_ver()[0]
    return (*system, " ".join(sorted(flags.split())))


def _key(spec: pb.StageSpec, loaded: Loaded) -> DraftProfileKey:
    info = cast("dict[str, object]", mx.device_info())
    bits = spec.kv_bits
    drafter = getattr(loaded.head, "fingerprint", "")  # a head's weights are the model's
    return DraftProfileKey(
        device=str(info.get("device_name", mx.default_device())),
        checkpoint=loaded.fingerprint + (f", drafter {drafter}" if drafter else ""),
        dtype=spec.dtype + (f", caches of {bits} bits" if bits else ""),
        software=" ".join((*map(version, _SOFTWARE), *used(loaded.kernels))),
        draft_vocabulary=spec.draft_vocabulary,
    )
