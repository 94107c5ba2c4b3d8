"""Checks with a small model that a stage computes the same as its layers in the whole model.

The small model has random weights, tiny sizes, and the real one's structure and number of layers,
so exactly the planned layers [first, end) are checked. It runs whole once, through prompt chunks,
single tokens, a block and, if its caches support it, a rollback. Then the stage runs alone on the
recorded inputs of its layers, with NaN in all weights that it must not need, and must give the same
bits. So a model fails if its layers share state beside hidden states and their own caches.

The whole small model must also give the same result, up to rounding, however a prompt is cut into
forwards: a pipeline cuts it differently from one node.
"""

import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from ...mtp.caches.rollback import cache_arrays, can_roll_back, rollback
from ...mtp.families.table import prepare
from ...placement.cluster import layer_range
from ...placement.config import vocabulary_size
from ...placement.errors import InvalidCard, LoadFailed
from ...placement.split_refusal import SplitRefusal
from ..checkpoint.files import read_bounded, write_atomic
from .layer_view import LayerRecords
from .open_model import MODEL_FAULTS, headline, mlx_lm_type, model_classes, parameters_of
from .small_config import small_config
from .stage_model import ONE_NODE, StageModel

log = logging.getLogger(__name__)

_SCHEDULE_VERSION: Final = 5
_MAX_NUMBERS: Final = 100_000_000
_MAX_BYTES: Final = 1 << 16
_MOST_IDS: Final = 251
_FEW_STEPS: Final = 3
"""Steps of the schedule that suffice to find borders worth planning."""
_BORDERS_TRIED: Final = 24


class _Step(NamedTuple):
    """One forward: the rows that it writes, and the rows to roll back afterwards."""

    rows: int
    back: int = 0


_SCHEDULE: Final = (_Step(9), _Step(3), _Step(1), _Step(4, back=2), _Step(1))
"""Two prompt chunks (together over a small window), a token, a verify with rollback, a token."""


_CUT: Final = (9, 11, 1)
"""Rows of forwards over a prompt that is longer than two small windows, against one forward."""
_CUT_ERROR: Final = 1e-3
"""The most relative error of logits; rounding causes at most 1e-5 in float32."""
_STARTS: Final = (0, 101)
"""Starts of two prompts: for a single one, rounding may change a router's near tie."""


class _Result(BaseModel):
    """A result file; content that does not fit is ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    refusal: str = Field(max_length=2000)
    """Empty if the check passed."""
    borders: Annotated[tuple[int, ...], Strict(False)] = Field(max_length=_BORDERS_TRIED)


def require_splittable(config: Mapping[str, Any], first: int, end: int, folder: str) -> None:
    """Checks a stage of layers [first, end) of this config.json. Raises LoadFailed.

    The error's `param` names the layers at which stages may begin, as far as they were determined.
    The result is stored in `folder`, unless it is "", for this structure, stage, mlx-lm and MLX:
    the check takes seconds.
    """
    small = json.dumps(small_config(config), sort_keys=True)
    key = small, first, end, version("mlx-lm"), version("mlx"), _SCHEDULE_VERSION
    name = f"split-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.json"
    path = Path(folder) / name if folder else None
    result = _read(path) if path is not None else None
    if result is None:
        refusal, borders = stage_fault(small, first, end)
        result = _Result(refusal=refusal[:2000], borders=borders)
        if path is not None:
            _write(path, result)
    if result.refusal:
        refused = SplitRefusal(result.refusal, frozenset(result.borders))
        remedy = "place it on one node" if refused.forbids else "other splits may do"
        raise LoadFailed(
            f"{layer_range(first, end)} of a {str(config.get('model_type'))[:200]} model cannot be "
            f"a stage of their own ({result.refusal}); {remedy}",
            param=refused.param,
        )


@lru_cache(maxsize=64)
def stage_fault(small: str, first: int, end: int) -> tuple[str, tuple[int, ...]]:
    """The reason why layers [first, end) of this (small) config cannot be a stage, and borders.

    The reason is empty if they can. The borders are some near the planned ones at which the model
    can be cut in two; none if that would not help. Runs on MLX's thread.
    """
    try:
        with mx.stream(trial_device()):
            return _stage_fault(cast("dict[str, Any]", json.loads(small)), first, end)
    except (LoadFailed, InvalidCard) as refused:
        return refused.message.removesuffix(ONE_NODE), ()
    except MODEL_FAULTS as raised:
        return f"its small model cannot be run: {headline(raised)}", ()


def trial_device() -> mx.Device:
    """The device of small models: not CUDA, whose products round float32 so coarsely (TF32) that a
    cut of the prompt would seem to change the logits."""
    return mx.Device(mx.cpu) if mx.cuda.is_available() else mx.default_device()


def _stage_fault(config: dict[str, Any], first: int, end: int) -> tuple[str, tuple[int, ...]]:
    trial = SplitTrial(small_model(config), min(_MOST_IDS, vocabulary_size(config)))
    fault = trial.fault(first, end)
    if not fault and (fault := trial.cut_fault()):
        return fault, ()
    planned = {first, end} - {0, trial.layers}
    borders = trial.borders_near(planned) if fault else ()
    # A stage that fails between good borders lacks something else.
    return fault, () if planned <= set(borders) else borders


class SplitTrial:
    """A small model with random weights, and its results as a whole."""

    def __init__(self, model: nn.Module, ids: int) -> None:
        """`ids`: the number of ids. Raises LoadFailed and the errors of the model's class."""
        self.model = model
        self._ids = ids
        self.layers = len(cast(Any, model).layers)
        self._weights = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
        whole = StageModel(model, 0, self.layers)
        self._can_roll_back = can_roll_back(whole.make_caches())
        self._whole_steps = [_whole_step(whole, *each) for each in self._forwards(whole, _SCHEDULE)]
        if not all(mx.isfinite(step.logits).all().item() for step in self._whole_steps):
            raise LoadFailed("its small model gives no finite numbers")

    def fault(self, first: int, end: int, steps: int = len(_SCHEDULE)) -> str:
        """How the stage [first, end) differs from its layers in the whole model; empty if not."""
        stage = StageModel(self.model, first, end)
        self._poison(first, end)
        try:
            forwards = self._forwards(stage, _SCHEDULE[:steps])
            for (ids, caches), whole in zip(forwards, self._whole_steps, strict=False):
                _compare_step(stage, ids, caches, whole)
        except _Difference as differs:
            return str(differs)
        except LoadFailed as refused:
            return refused.message.removesuffix(ONE_NODE)
        except MODEL_FAULTS as raised:
            return f"they need more than the hidden states of the layers before: {headline(raised)}"
        finally:
            _ = self.model.update(tree_unflatten(self._weights))
        return ""

    def cut_fault(self) -> str:
        """The reason if the whole model's logits depend on how a prompt is cut, else empty."""
        whole = StageModel(self.model, 0, self.layers)
        if all(_cut_error(whole, self._ids, start) > _CUT_ERROR for start in _STARTS):
            return (
                "its class gives other logits where a prompt is read in other forwards, and "
                "several nodes read it in others than one does"
            )
        return ""

    def borders_near(self, planned: Collection[int]) -> tuple[int, ...]:
        """The layers near the planned ones at which the model can be cut in two."""
        by_distance = sorted(
            range(1, self.layers), key=lambda at: min(abs(at - each) for each in planned)
        )
        good = (
            at
            for at in by_distance[:_BORDERS_TRIED]
            if not self.fault(0, at, _FEW_STEPS) and not self.fault(at, self.layers, _FEW_STEPS)
        )
        return tuple(sorted(good))

    def _forwards(
        self, stage: StageModel, schedule: Sequence[_Step]
    ) -> Iterator[tuple[mx.array, list[Any]]]:
        """The ids and the caches of each forward of the schedule, one after the other."""
        caches, position = stage.make_caches(), 0
        for step in schedule:
            yield _tokens(position, step.rows, self._ids), caches
            mx.eval(cache_arrays(caches))
            if step.back and self._can_roll_back:
                rollback(caches, step.back)
                position -= step.back
            position += step.rows

    def _poison(self, first: int, end: int) -> None:
        """Sets the weights that the stage must not need to NaN: other layers', outer ones."""
        layers = cast("list[nn.Module]", cast(Any, self.model).layers)
        own_ids = {id(value) for layer in layers[first:end] for value in parameters_of(layer)}
        layer_ids = {id(value) for layer in layers for value in parameters_of(layer)}
        needed_ids = (
            own_ids if first else own_ids | {id(value) for _, value in self._weights} - layer_ids
        )
        weights = [(n, v if id(v) in needed_ids else _nan(v)) for n, v in self._weights]
        _ = self.model.update(tree_unflatten(weights))


class _Difference(Exception):
    """A stage's numbers differ from the whole model's."""


class _WholeStep(NamedTuple):
    """The results of one step of the whole model."""

    records: LayerRecords
    logits: mx.array


def _cut_error(whole: StageModel, ids: int, start: int) -> float:
    """The relative error of the last logits between a prompt cut in forwards and one forward."""
    ends: list[mx.array] = []
    for rows in ((sum(_CUT),), _CUT):
        caches, position, last = whole.make_caches(), start, mx.zeros(1)
        for each in rows:
            logits, _ = whole.record(_tokens(position, each, ids), caches)
            last = logits.reshape(-1, logits.shape[-1])[-1].astype(mx.float32)
            mx.eval(last, cache_arrays(caches))
            position += each
        ends.append(last)
    one, cut = ends
    return cast("float", (mx.linalg.norm(cut - one) / mx.linalg.norm(one)).item())


def _whole_step(stage: StageModel, ids: mx.array, caches: list[Any]) -> _WholeStep:
    logits, records = stage.record(ids, caches)
    mx.eval(logits, list(records.inputs.values()), list(records.outputs.values()))
    return _WholeStep(records, logits)


def _compare_step(stage: StageModel, ids: mx.array, caches: list[Any], whole: _WholeStep) -> None:
    """Runs one step of the stage and compares it. Raises _Difference."""
    records = whole.records
    entering = records.inputs[stage.first] if stage.first else None
    own = stage.hidden(ids, entering, caches)
    _compare(own, records.outputs[stage.end - 1], "hidden states")
    if not stage.first:
        last = records.outputs[stage.num_layers - 1]
        _compare(stage.logits(ids, last), whole.logits, "logits")


def _compare(actual: mx.array, expected: mx.array, what: str) -> None:
    if mx.array_equal(actual, expected).item():
        return
    if mx.isfinite(actual).all().item():
        raise _Difference(f"their {what} alone differ from those in the whole model")
    raise _Difference(f"their {what} depend on weights that other stages hold")


def small_model(config: Mapping[str, Any], *, stock: bool = False) -> nn.Module:
    """A model with random weights, a function of the config. `stock`: keep mlx-lm's layers."""
    config = {**config, "model_type": mlx_lm_type(config["model_type"])}
    classes = model_classes(config)
    arguments: Any = classes[1]
    model: nn.Module = cast(Any, classes[0])(arguments.from_dict(config))
    flat = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    if (numbers := sum(value.size for _, value in flat)) > _MAX_NUMBERS:
        raise ValueError(f"it has {numbers} parameters however small its config.json is made")
    _ = model.update(tree_unflatten([(n, _noise(i, v)) for i, (n, v) in enumerate(flat)]))
    _ = model.eval()
    if not stock:
        prepare(model)
    return model


def _nan(value: mx.array) -> mx.array:
    floating = mx.issubdtype(value.dtype, mx.floating)
    return mx.full(value.shape, float("nan"), value.dtype) if floating else value


def _noise(index: int, value: mx.array) -> mx.array:
    """Random weights. Initial zeros (routers) or ones (norms) would hide faults."""
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    noise = mx.random.normal(value.shape, key=mx.random.key(index))
    if value.ndim > 1:
        return noise * value.shape[-1] ** -0.5
    return value.astype(mx.float32) + 0.1 * noise


def _tokens(position: int, rows: int, ids: int) -> mx.array:
    return mx.array([[(37 * i + 11) % ids for i in range(position, position + rows)]])


def _read(path: Path) -> _Result | None:
    if not path.exists():
        return None
    try:
        return _Result.model_validate_json(read_bounded(path, _MAX_BYTES))
    except (OSError, ValueError) as fault:
        reason = "malformed" if isinstance(fault, ValidationError) else str(fault)
        log.warning("the result of a check in %s cannot be used: %s", path.name, reason)
        return None


def _write(path: Path, result: _Result) -> None:
    """Stores a result. An error of the disk is only logged: the class is checked again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, result.model_dump_json().encode())
    except OSError as fault:
        log.warning("the result of a check could not be saved: %s", fault.strerror)
