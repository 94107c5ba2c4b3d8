"""Layer times of models on this machine, one small file each, and what heartbeats tell of them."""

import hashlib
import json
import logging
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...proto import peer_pb2 as pb
from ...shard.checkpoint.files import write_atomic

log = logging.getLogger(__name__)

MAX_BYTES: Final = 1 << 16
MAX_PROFILES: Final = 64
"""Told in each heartbeat; of more, the ones measured last."""
_PREFIX: Final = "layers-"

_Seconds = Annotated[float, Field(ge=0, le=3600)]
_Rows = Annotated[int, Field(ge=1, le=65536)]


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What decides the speed of a model's layers here; another value is another profile."""

    checkpoint: str
    dtype: str
    device: str
    mlx: str

    @property
    def file(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


class _Stored(BaseModel):
    """The file; anything that does not fit is no profile."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    key: dict[str, str]
    model: Annotated[str, Field(min_length=1, max_length=200)]
    decode_s: Annotated[float, Field(gt=0, le=3600)]
    verify_s: _Seconds
    verify_rows: _Rows
    prefill_s: _Seconds
    prefill_rows: _Rows
    tail_s: _Seconds
    corrected: Annotated[object, Field(exclude=True, repr=False)] = None
    """Earlier versions stored layer times measured during answers here. Read and dropped."""


class LayerProfiles:
    """The profiles of this machine as it is now; those of another MLX or device do not count."""

    def __init__(self, folder: Path, device: str, mlx: str) -> None:
        """Reads what `folder` holds; a file that cannot be used is measured anew. Blocks."""
        self._folder = folder
        self._device = device
        self._mlx = mlx
        self._known: dict[ProfileKey, _Stored] = {}
        self._lock = threading.Lock()
        """What blocks runs beside the event loop."""
        for path in sorted(folder.glob(f"{_PREFIX}*.json"), key=lambda p: p.stat().st_mtime_ns):
            self._read(path)

    def missing(self, checkpoint: str, dtype: str, *, generator: bool) -> bool:
        """Whether a stage of this checkpoint should be timed; a generator has a tail too."""
        known = self._known.get(self._key(checkpoint, dtype))
        return known is None or (generator and known.tail_s == 0)

    def keep(self, checkpoint: str, times: pb.LayerTimes) -> None:
        """A measurement; the tail of an earlier one stays where this one has none. Blocks.

        A disk that is full costs the file only. Raises ValueError for figures that are no times.
        """
        key = self._key(checkpoint, times.dtype)
        with self._lock:
            earlier = self._known.get(key)
            tail = times.tail_s or (earlier.tail_s if earlier else 0.0)
            stored = _Stored(
                key=asdict(key),
                model=times.model,
                decode_s=times.decode_s,
                verify_s=times.verify_s,
                verify_rows=times.verify_rows,
                prefill_s=times.prefill_s,
                prefill_rows=times.prefill_rows,
                tail_s=tail,
            )
            _ = self._known.pop(key, None)  # for it is now the one measured last
            self._known[key] = stored
        self._write(key, stored)

    def times(self) -> list[pb.LayerTimes]:
        """For the heartbeat; the last of a model is the one measured last."""
        return [
            pb.LayerTimes(
                model=stored.model,
                dtype=key.dtype,
                decode_s=stored.decode_s,
                verify_s=stored.verify_s,
                verify_rows=stored.verify_rows,
                prefill_s=stored.prefill_s,
                prefill_rows=stored.prefill_rows,
                tail_s=stored.tail_s,
            )
            for key, stored in list(self._known.items())[-MAX_PROFILES:]
        ]

    def _key(self, checkpoint: str, dtype: str) -> ProfileKey:
        return ProfileKey(checkpoint, dtype, self._device, self._mlx)

    def _write(self, key: ProfileKey, stored: _Stored) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._folder / key.file, stored.model_dump_json().encode())
        except OSError as fault:
            log.warning("measured layer times could not be saved: %s", fault.strerror)

    def _read(self, path: Path) -> None:
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ValueError(f"it has over {MAX_BYTES} bytes")
            stored = _Stored.model_validate_json(path.read_bytes())
            key = ProfileKey(**stored.key)
            if key.file != path.name:
                raise ValueError("it was measured for something else")
        except (OSError, ValueError, TypeError) as fault:
            reason = "malformed" if isinstance(fault, ValidationError | TypeError) else str(fault)
            log.warning("the saved layer times in %s cannot be used: %s", path.name, reason)
            return
        if (key.device, key.mlx) == (self._device, self._mlx):
            self._known[key] = stored
