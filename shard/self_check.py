"""Whether a model class may be split over nodes: a small one of it, whole and as two stages.

The small model has random weights and the real one's structure. Prompt chunks, single tokens, a
block and, where the caches can, its rollback must give the same bits both ways. The first stage
runs through the whole schedule before the second begins, as another process would see it: state
that layers share beside the hidden states and their own caches is then not there.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes  # pyright: ignore[reportPrivateUsage]
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..mtp.family import prepare
from ..mtp.rollback import cache_arrays, can_roll_back, rollback
from ..placement.errors import LoadFailed
from .kept_file import write_whole
from .small_config import small_config
from .stage_model import MODEL_FAULTS, REFUSED, StageModel, known_type

log = logging.getLogger(__name__)

_SCHEDULE_VERSION: Final = 1
_MAX_NUMBERS: Final = 100_000_000
_MAX_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class _Step:
    """One forward: rows written, and how many of them are taken back afterwards."""

    rows: int
    back: int = 0


_SCHEDULE: Final = (_Step(9), _Step(5), _Step(1), _Step(1), _Step(4, back=2), _Step(1), _Step(3))
"""Two prompt chunks (longer together than a small window), tokens, a verify, and on from there."""


class _Stored(BaseModel):
    """The file; anything that does not fit is no result."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    architecture: str = Field(max_length=200)
    config: str = Field(pattern=r"^[0-9a-f]{64}$")
    mlx_lm: str = Field(max_length=100)
    mlx: str = Field(max_length=100)
    schedule: int
    refusal: str = Field(max_length=2000)
    """Empty: it passed."""


def require_splittable(config: Mapping[str, Any], folder: str) -> None:
    """Raises LoadFailed where the class of this config.json failed its check.

    The result is kept in `folder` ("": nowhere) for this structure, mlx-lm and MLX.
    """
    small = small_config(config)
    key = _key(small)
    path = Path(folder) / f"split-{key.config[:32]}.json" if folder else None
    known = _read(path, key) if path is not None else None
    refusal = known.refusal if known is not None else split_fault(small)
    if known is None and path is not None:
        _write(path, key.model_copy(update={"refusal": refusal[:2000]}))
    if refusal:
        raise LoadFailed(
            f"models of the class {key.architecture} have not passed the check for splitting "
            f"({refusal}), so this model cannot be split; place it on one node",
            param=REFUSED,
        )


def split_fault(small: Mapping[str, Any]) -> str:
    """Why a model of this (small) config cannot be split, empty where it can. On MLX's thread."""
    try:
        whole, parts = _build(small), _build(small)
        _ = parts.update(whole.parameters())
        wanted = _run_whole(whole)
        if not all(mx.isfinite(logits).all().item() for logits in wanted):
            return "its small model gives no finite numbers"
        for at in _splits(len(cast(Any, whole).layers)):
            if (step := _first_difference(wanted, _run_split(parts, at))) is not None:
                return f"two stages that meet at layer {at} differ from the whole at step {step}"
    except LoadFailed as fault:
        return fault.message
    except MODEL_FAULTS as fault:
        return f"its small model cannot be run: {type(fault).__name__}: {fault}"
    return ""


def _splits(layers: int) -> list[int]:
    """In the middle, and where a stage has one layer and so none of the other kinds."""
    return sorted({layers // 2, 1, layers - 1} - {0, layers})


def _build(small: Mapping[str, Any]) -> nn.Module:
    config = {**small, "model_type": known_type(small["model_type"])}
    model_class, arguments = _get_classes(config)
    model: nn.Module = model_class(arguments.from_dict(config))
    flat = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    if (numbers := sum(value.size for _, value in flat)) > _MAX_NUMBERS:
        raise ValueError(f"it has {numbers} parameters however small its config.json is made")
    _ = model.update(tree_unflatten([(n, _noise(i, v)) for i, (n, v) in enumerate(flat)]))
    _ = model.eval()
    prepare(model)
    return model


def _noise(index: int, value: mx.array) -> mx.array:
    """Nothing stays constant: what starts as zeros (routers) or ones (norms) would hide faults."""
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    noise = mx.random.normal(value.shape, key=mx.random.key(index))
    if value.ndim > 1:
        return noise * value.shape[-1] ** -0.5
    return value.astype(mx.float32) + 0.1 * noise


def _ids(position: int, rows: int) -> mx.array:
    return mx.array([[(37 * i + 11) % 251 for i in range(position, position + rows)]])


def _run_whole(model: nn.Module) -> list[mx.array]:
    """The logits of every step."""
    caches = StageModel(model, 0, len(cast(Any, model).layers)).make_caches()
    found: list[mx.array] = []
    position = 0
    for step in _SCHEDULE:
        logits = cast(Any, model)(_ids(position, step.rows), cache=caches)
        found.append(_done(logits, caches))
        position += step.rows - _take_back(caches, step)
    return found


def _run_split(model: nn.Module, at: int) -> list[mx.array]:
    layers = len(cast(Any, model).layers)
    first, second = StageModel(model, 0, at), StageModel(model, at, layers)
    takes_back = all(can_roll_back(s.own_caches(s.make_caches())) for s in (first, second))
    between = _run_stage(first, [None] * len(_SCHEDULE), takes_back)
    ended = _run_stage(second, between, takes_back)
    found: list[mx.array] = []
    position = 0
    for step, hidden in zip(_SCHEDULE, ended, strict=True):
        logits = first.logits(_ids(position, step.rows), hidden)
        mx.eval(logits)
        found.append(logits)
        position += step.rows - (step.back if takes_back else 0)
    return found


def _run_stage(
    stage: StageModel, entering: Sequence[mx.array | None], takes_back: bool
) -> list[mx.array]:
    """The hidden states that leave the stage at every step."""
    caches = stage.make_caches()
    own = stage.own_caches(caches)
    found: list[mx.array] = []
    position = 0
    for step, hidden in zip(_SCHEDULE, entering, strict=True):
        out = stage.hidden(_ids(position, step.rows), hidden, caches)
        found.append(_done(out, own))
        position += step.rows - (_take_back(own, step) if takes_back else 0)
    return found


def _take_back(caches: Sequence[object], step: _Step) -> int:
    """How many rows were taken back: none where a cache of the model cannot."""
    if not step.back or not can_roll_back(caches):
        return 0
    rollback(caches, step.back)
    return step.back


def _done(out: mx.array, caches: Sequence[object]) -> mx.array:
    mx.eval(out, cache_arrays(caches))
    return out


def _first_difference(wanted: Sequence[mx.array], found: Sequence[mx.array]) -> int | None:
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        if not mx.array_equal(one, other).item():
            return number
    return None


def _key(small: Mapping[str, Any]) -> _Stored:
    text = json.dumps(small, sort_keys=True)
    return _Stored(
        architecture=str(small.get("model_type", ""))[:200],
        config=hashlib.sha256(text.encode()).hexdigest(),
        mlx_lm=version("mlx-lm"),
        mlx=version("mlx"),
        schedule=_SCHEDULE_VERSION,
        refusal="",
    )


def _read(path: Path, key: _Stored) -> _Stored | None:
    """The kept result; None where there is none for this key."""
    if not path.exists():
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has over {_MAX_BYTES} bytes")
        stored = _Stored.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as fault:
        reason = "malformed" if isinstance(fault, ValidationError) else str(fault)
        log.warning("the result of a check in %s cannot be used: %s", path.name, reason)
        return None
    return stored if stored.model_copy(update={"refusal": ""}) == key else None


def _write(path: Path, result: _Stored) -> None:
    """A disk that is full costs the file only: the class is checked again."""
    try:
        write_whole(path, result.model_dump_json())
    except OSError as fault:
        log.warning("the result of a check could not be saved: %s", fault.strerror)
