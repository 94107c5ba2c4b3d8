"""Files of this machine that outlive a runner: measurements of a model, and prefixes."""

import time
from importlib.metadata import version
from pathlib import Path
from typing import cast

import mlx.core as mx

from ...proto import peer_pb2 as pb
from ..engine.draft_profile import DraftProfile, DraftProfileKey
from ..engine.prefix_disk import PrefixDisk
from ..kernels.install import used
from ..model.load import Loaded


def profile_of(spec: pb.StageSpec, loaded: Loaded) -> DraftProfile:
    """The measurements of adaptive drafting and of the probes, for this model on this machine."""
    return DraftProfile.open(spec.profile_folder, _key(spec, loaded), time.perf_counter)


def prefix_disk_of(spec: pb.StageSpec, loaded: Loaded) -> PrefixDisk | None:
    """The prefix cache on disk; None if it is off."""
    if not (spec.prefix_disk_bytes and spec.prefix_folder and spec.prefix_cache_bytes):
        return None
    # A fingerprint does not cover weights: changed files must not use old prefixes.
    files = sorted(Path(spec.path).glob("*.safetensors"))
    file_states = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    # The rows that reach a stage have the bits of the machines and layers before it.
    before = [(each.node, each.end_layer) for each in spec.plan.stages[: spec.stage]]
    parts = (
        version("exo-node"),  # its kernels and its forwards
        _key(spec, loaded),
        (spec.mtp_hidden, spec.prefill_chunk, spec.kv_group_size),
        (spec.first_layer, spec.end_layer, before),
        file_states,
    )
    folder, caches = Path(spec.prefix_folder), loaded.model.make_caches
    return PrefixDisk(folder, repr(parts), spec.prefix_disk_bytes, caches, spec.model)


def _key(spec: pb.StageSpec, loaded: Loaded) -> DraftProfileKey:
    info = cast("dict[str, object]", mx.device_info())
    bits = spec.kv_bits
    return DraftProfileKey(
        device=str(info.get("device_name", mx.default_device())),
        checkpoint=loaded.fingerprint,
        dtype=spec.dtype + (f", caches of {bits} bits" if bits else ""),
        mlx=" ".join((version("mlx"), version("mlx-lm"), *used(loaded.kernels))),
        fixed_rows=spec.fixed_rows,
        draft_vocabulary=spec.draft_vocabulary,
    )
