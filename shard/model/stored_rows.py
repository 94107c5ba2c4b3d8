"""The numbers of rows that agree, kept on disk for a machine and checkpoint.

Another device, MLX or checkpoint has another file; what was measured for something else, or does
not fit the schema, is not believed but measured again.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final

import mlx.core as mx
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from ..checkpoint.files import read_bounded, write_atomic
from ..kernels.row_products import MOST_COMPARED
from ..kernels.row_sets import RowRange

log = logging.getLogger(__name__)

_MAX_BYTES: Final = 1 << 18
_SCHEMA: Final = "1"
_Range = Annotated[tuple[int, int], Strict(False)]


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    key: dict[str, str]
    ranges: dict[str, _Range] = Field(max_length=1000)


class StoredRows:
    """The file of a checkpoint on this machine. Without a folder nothing is read or written."""

    def __init__(self, folder: str, fingerprint: str) -> None:
        self._key = {
            "rows of products": _SCHEMA,
            "device": json.dumps(mx.device_info(), sort_keys=True, default=str),
            "mlx": f"{version('mlx')} {version('mlx-lm')}",
            "checkpoint": fingerprint,
        }
        text = json.dumps(self._key, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:32] + ".json"
        self._path = Path(folder) / name if folder and fingerprint else None

    def read(self) -> dict[str, RowRange]:
        """The rows that agree, by `ProductKind.key`; empty if there is no usable file."""
        if self._path is None or not self._path.exists():
            return {}
        try:
            stored = _Stored.model_validate_json(read_bounded(self._path, _MAX_BYTES))
            ranges = {key: RowRange(*each) for key, each in stored.ranges.items()}
            if stored.key != self._key:
                raise ValueError("they were measured for something else")
            if any(not 1 <= r.floor <= r.ceiling <= MOST_COMPARED for r in ranges.values()):
                raise ValueError("a set of rows is none")
        except (OSError, ValueError) as fault:
            reason = "malformed" if isinstance(fault, ValidationError) else str(fault)
            log.warning("the saved rows in %s are measured again: %s", self._path.name, reason)
            return {}
        return ranges

    def write(self, ranges: Mapping[str, RowRange]) -> None:
        """A failure is logged: the next load measures again."""
        if self._path is None:
            return
        pairs = {key: (each.floor, each.ceiling) for key, each in ranges.items()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = _Stored(key=self._key, ranges=pairs).model_dump_json()
            write_atomic(self._path, text.encode())
        except OSError as fault:
            log.warning("measured rows could not be saved: %s", fault.strerror)
