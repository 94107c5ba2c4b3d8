"""Layer times of models on this machine, one small file each, for heartbeats and the planner."""

import hashlib
import json
import logging
import statistics
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...placement.cluster import NOISE
from ...placement.gpu_faults import ChunkLimit, GpuFault, limit_of
from ...proto import peer_pb2 as pb
from ...proto.bounds import MAX_COUNT
from ...shard.checkpoint.files import read_bounded, write_atomic
from ..machine.hardware import Hardware

log = logging.getLogger(__name__)

MAX_BYTES: Final = 1 << 16
MAX_PROFILES: Final = 64
"""The number of profiles in a heartbeat, the latest ones."""
MAX_FILES: Final = 512
"""The number of files that a start reads, the latest ones: what others have is measured again."""
TIMES: Final = ("decode_s", "verify_s", "verify_rows", "prefill_s", "prefill_rows", "tail_s")
"""The fields of a measurement: of a file, a message and the API."""
VOTES: Final = 9
"""Answers, the measurement at load among them, whose lower median is what a step takes."""
SECONDS: Final = ("decode_s", "verify_s", "prefill_s", "tail_s")
MAX_SPEEDUP: Final = 9
"""Tokens of a round with eight drafts, the most that a head may have."""
_PREFIX: Final = "layers-"
_SHORTEST_S: Final = 1e-9
_LONGEST_S: Final = 3600

_Seconds = Annotated[float, Field(ge=0, le=_LONGEST_S)]
_Rows = Annotated[int, Field(ge=1, le=65536)]


@dataclass(frozen=True, slots=True)
class LayerProfileKey:
    """The conditions of a measurement: layer times under others are another profile."""

    checkpoint: str
    dtype: str
    device: str
    mlx: str

    @property
    def file(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


class _LayerProfile(BaseModel):
    """The content of a profile's file."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    key: dict[str, str]
    model: Annotated[str, Field(min_length=1, max_length=200)]
    decode_s: Annotated[float, Field(ge=_SHORTEST_S, le=_LONGEST_S)]
    verify_s: _Seconds
    verify_rows: _Rows
    prefill_s: _Seconds
    prefill_rows: _Rows
    tail_s: _Seconds
    layer_bytes: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """Or 0 if an earlier version measured it, which a load repeats."""
    mtp_speedup: Annotated[float, Field(ge=0, le=MAX_SPEEDUP)] = 0.0
    chunk_limit: Annotated[int, Field(ge=0, le=65536)] = 0
    chunk_fault: Annotated[str, Field(max_length=20)] = ""

    def seconds(self, layers: int, *, tail: bool) -> float:
        """A plain step of `layers` layers."""
        return layers * self.decode_s + (self.tail_s if tail else 0.0)

    def scaled(self, factor: float) -> Self:
        """The times of a machine that takes `factor` times as long for everything."""
        times = {n: float(min(_LONGEST_S, getattr(self, n) * factor)) for n in SECONDS}
        times["decode_s"] = max(_SHORTEST_S, times["decode_s"])
        return self.model_copy(update=times)


@dataclass(frozen=True, slots=True)
class _Votes:
    """Steps of one profile as answers showed them, relative to the measurement before them."""

    measured: _LayerProfile
    factors: deque[float]

    @property
    def factor(self) -> float:
        """The lower median: of two that differ the faster counts, for what else a machine does
        only ever adds time. No single answer moves that of three."""
        return statistics.median_low(self.factors)


def _is_near(figure: float, other: float) -> bool:
    return abs(figure - other) <= NOISE * other


class LayerProfiles:
    """The profiles of this machine with its present device and MLX."""

    def __init__(self, folder: Path, device: str, mlx: str) -> None:
        """Reads the files in `folder`; what is in an unusable one is measured again. Blocks."""
        self._folder = folder
        self._device = device
        self._mlx = mlx
        self._profiles: dict[LayerProfileKey, _LayerProfile] = {}
        """The oldest measurement first."""
        self._votes: dict[LayerProfileKey, _Votes] = {}
        self._limits: dict[tuple[str, GpuFault], ChunkLimit] = {}
        """The chunks that GPU faults have limited, by model and fault: a head then sees each that
        refuses."""
        self._lock = threading.Lock()
        """`store` runs in threads, because it blocks."""
        files = ((p.lstat().st_mtime_ns, p) for p in folder.glob(f"{_PREFIX}*.json"))
        for _, path in sorted(files)[-MAX_FILES:]:
            self._read(path)

    @classmethod
    def of(cls, data_dir: Path, hardware: Hardware) -> Self:
        """The profiles in a node's data folder. Blocks."""
        device = f"{hardware.chip}, {hardware.backend}"
        return cls(data_dir / "profiles", device, installed_version("mlx"))

    def missing(self, checkpoint: str, dtype: str, *, generator: bool) -> bool:
        """Whether a stage of this checkpoint should be timed; a generator has a tail too."""
        profile = self._profiles.get(self._key(checkpoint, dtype))
        return profile is None or not profile.layer_bytes or (generator and profile.tail_s == 0)

    def store(self, checkpoint: str, times: pb.LayerTimes) -> None:
        """Stores a measurement; where it has no tail, an earlier one's stays. Blocks.

        Without disk space it is kept in memory only. Raises ValueError for invalid times.
        """
        key = self._key(checkpoint, times.dtype)
        with self._lock:
            earlier = self._profiles.get(key)
            measured = {name: getattr(times, name) for name in (*TIMES, "layer_bytes")}
            if earlier is not None and not times.tail_s:
                measured["tail_s"] = earlier.tail_s
            profile = _LayerProfile(key=asdict(key), model=times.model, **measured)
            _ = self._profiles.pop(key, None)  # moves it to the end
            self._profiles[key] = profile
            _ = self._votes.pop(key, None)
        self._write(key, profile)

    def correct(self, spec: pb.StageSpec, step_s: float, mtp_speedup: float = 0.0) -> None:
        """Counts what a plain step of a stage took in an answer, and what drafts gain. Blocks.

        The profile changes only if it is off by more than NOISE, so that it and plans stay. A
        figure out of bounds counts for nothing.
        """
        key = self._key(spec.checkpoint_sha256, spec.dtype)
        layers, whole = spec.end_layer - spec.first_layer, spec.num_stages == 1
        with self._lock:
            profile = self._profiles.get(key)
            if profile is None:
                return
            votes = self._votes.setdefault(key, _Votes(profile, deque([1.0], VOTES)))
            if layers > 0 and _SHORTEST_S <= step_s <= _LONGEST_S:
                votes.factors.append(step_s / votes.measured.seconds(layers, tail=whole))
            corrected = votes.measured.scaled(votes.factor)
            if _is_near(corrected.decode_s, profile.decode_s):
                corrected = profile
            gain = mtp_speedup if 1 <= mtp_speedup <= MAX_SPEEDUP else profile.mtp_speedup
            if _is_near(gain, profile.mtp_speedup):
                gain = profile.mtp_speedup
            if corrected is profile and gain == profile.mtp_speedup:
                return
            corrected = corrected.model_copy(update={"mtp_speedup": gain})
            self._profiles[key] = corrected
        log.info("answers of %s correct what is expected of them", profile.model)
        self._write(key, corrected)

    def chunk_limit(self, model: str) -> ChunkLimit | None:
        """The limit on the rows of a prompt in one forward, or None."""
        limits = (limit for (limited, _), limit in self._limits.items() if limited == model)
        return min(limits, default=None)

    def is_short_of_memory(self, model: str) -> bool:
        """Whether want of memory has limited its chunk since this node started."""
        return (model, "memory") in self._limits

    def limit_chunk(self, spec: pb.StageSpec, limit: ChunkLimit) -> Callable[[], None]:
        """Sets a limit at once. Returns the work of saving it, which blocks."""
        key = self._key(spec.checkpoint_sha256, spec.dtype)
        self._limits[spec.model, limit.fault] = limit
        profile = self._profiles.get(key)
        return lambda: None if profile is None else self._write(key, profile)

    def times(self) -> list[pb.LayerTimes]:
        """The times for the heartbeat; the latest measurement of a model is its last entry."""
        latest = list(self._profiles.items())[-MAX_PROFILES:]
        measured = {profile.model for _, profile in latest}
        unmeasured = {model: True for model, _ in self._limits if model not in measured}
        messages = [
            *(pb.LayerTimes(model=model) for model in [*unmeasured][-MAX_PROFILES:]),
            *(
                pb.LayerTimes(
                    model=profile.model,
                    dtype=key.dtype,
                    layer_bytes=profile.layer_bytes,
                    mtp_speedup=profile.mtp_speedup,
                    **{name: getattr(profile, name) for name in TIMES},
                )
                for key, profile in latest
            ),
        ]
        for message in messages:
            if limit := self.chunk_limit(message.model):
                message.chunk_limit, message.chunk_fault = limit.rows, limit.fault
        return messages

    def _key(self, checkpoint: str, dtype: str) -> LayerProfileKey:
        return LayerProfileKey(checkpoint, dtype, self._device, self._mlx)

    def _write(self, key: LayerProfileKey, profile: _LayerProfile) -> None:
        # Memory may be there another time.
        if limit := self._limits.get((profile.model, "watchdog")):
            limited = {"chunk_limit": limit.rows, "chunk_fault": limit.fault}
            profile = profile.model_copy(update=limited)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._folder / key.file, profile.model_dump_json().encode())
        except OSError as fault:
            log.warning("measured layer times could not be saved: %s", fault.strerror)

    def _read(self, path: Path) -> None:
        try:
            profile = _LayerProfile.model_validate_json(read_bounded(path, MAX_BYTES))
            key = LayerProfileKey(**profile.key)
            if key.file != path.name:
                raise ValueError("it was measured for something else")
        except (OSError, ValueError, TypeError) as fault:
            reason = "malformed" if isinstance(fault, ValidationError | TypeError) else str(fault)
            log.warning("the saved layer times in %s cannot be used: %s", path.name, reason)
            return
        if (key.device, key.mlx) == (self._device, self._mlx):
            self._profiles[key] = profile
            if limit := limit_of(profile.chunk_limit, profile.chunk_fault):
                key_of_limit = profile.model, limit.fault
                self._limits[key_of_limit] = min(limit, self._limits.get(key_of_limit, limit))
