"""Files of this machine that outlive a runner: what was measured of a model, and prefixes."""

import time
from importlib.metadata import version
from pathlib import Path
from typing import cast

import mlx.core as mx

from ...proto import peer_pb2 as pb
from ..engine.draft_profile import Profile, ProfileKey
from ..engine.prefix_disk import PrefixDisk
from ..kernels.install import used
from ..model.load import Loaded


def profile_of(spec: pb.StageSpec, loaded: Loaded) -> Profile:
    """What adaptive drafting and the probes know of the model here."""
    return Profile.open(spec.profile_folder, _key(spec, loaded), time.perf_counter)


def prefix_disk_of(spec: pb.StageSpec, loaded: Loaded) -> PrefixDisk | None:
    """None where nothing is to be kept on disk."""
    if not (spec.prefix_disk_bytes and spec.prefix_folder and spec.prefix_cache_bytes):
        return None
    # A fingerprint knows no weights: files that changed since are others.
    files = sorted(Path(spec.path).glob("*.safetensors"))
    seen = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    key = repr((_key(spec, loaded), spec.mtp_hidden, spec.prefill_chunk, seen))
    caches = loaded.model.make_caches
    return PrefixDisk(Path(spec.prefix_folder), key, spec.prefix_disk_bytes, caches)


def _key(spec: pb.StageSpec, loaded: Loaded) -> ProfileKey:
    info = cast("dict[str, object]", mx.device_info())
    bits = spec.kv_bits
    return ProfileKey(
        device=str(info.get("device_name", mx.default_device())),
        checkpoint=loaded.fingerprint,
        dtype=spec.dtype + (f", caches of {bits} bits" if bits else ""),
        mlx=" ".join((version("mlx"), version("mlx-lm"), *used(loaded.kernels))),
        fixed_rows=spec.fixed_rows,
        draft_vocabulary=spec.draft_vocabulary,
    )
