"""Whether a stage computes what its layers do in the whole model: tried on a small one.

The small model has random weights, tiny sizes, and the real one's structure and number of layers,
so that the very layers [first, end) are tried that are planned. It runs whole once, through prompt
chunks, single tokens, a block and, where its caches can, a rollback. Then the stage runs alone on
what entered its layers, every number that it must not need replaced by NaN, and must give the same
bits: state that layers share beside hidden states and their own caches is then not there.

The whole small model must also give one result however a prompt is cut into forwards, up to
rounding: a pipeline cuts it otherwise than one node does.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeVar, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes  # pyright: ignore[reportPrivateUsage]
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from ...mtp.family import prepare
from ...mtp.rollback import cache_arrays, can_roll_back, rollback
from ...placement.cluster import layer_range
from ...placement.config import vocabulary_size
from ...placement.errors import InvalidCard, LoadFailed
from ...placement.split_refusal import SplitRefusal
from ..checkpoint.files import write_atomic
from .layer_view import Notes
from .small_config import small_config
from .stage_model import MODEL_FAULTS, ONE_NODE, StageModel, known_type, said

log = logging.getLogger(__name__)

_SCHEDULE_VERSION: Final = 4
_MAX_NUMBERS: Final = 100_000_000
_MAX_BYTES: Final = 1 << 16
_MOST_IDS: Final = 251
_FEW_STEPS: Final = 3
"""Of the schedule: enough to tell which borders are worth planning."""
_BORDERS_TRIED: Final = 24


@dataclass(frozen=True, slots=True)
class _Step:
    """One forward: rows written, and how many of them are taken back afterwards."""

    rows: int
    back: int = 0


_SCHEDULE: Final = (_Step(9), _Step(3), _Step(1), _Step(4, back=2), _Step(1))
"""Two prompt chunks (longer together than a small window), tokens, a verify, and on from there."""


_CUT: Final = (9, 11, 1)
"""Rows of forwards over a prompt that is longer than two small windows, against one forward."""
_CUT_ERROR: Final = 1e-3
"""Relative, of the logits: rounding leaves 1e-5 at most in float32."""
_STARTS: Final = (0, 101)
"""Two prompts: of one alone a router's near tie may be decided otherwise."""


class _Stored(BaseModel):
    """The file; anything that does not fit is no result."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    architecture: str = Field(max_length=200)
    config: str = Field(pattern=r"^[0-9a-f]{64}$")
    mlx_lm: str = Field(max_length=100)
    mlx: str = Field(max_length=100)
    schedule: int
    first: int
    end: int
    refusal: str = Field(max_length=2000)
    """Empty: it passed."""
    borders: Annotated[tuple[int, ...], Strict(False)] = Field(max_length=_BORDERS_TRIED)


def require_splittable(config: Mapping[str, Any], first: int, end: int, folder: str) -> None:
    """Raises LoadFailed where a stage of layers [first, end) of this config.json failed its check.

    Its `param` says at which layers stages may begin, as far as was found. The result is kept in
    `folder` ("": nowhere) for this structure, stage, mlx-lm and MLX.
    """
    small = small_config(config)
    key = _key(small, first, end)
    path = Path(folder) / f"split-{key.config[:32]}-{first}-{end}.json" if folder else None
    known = _read(path, key) if path is not None else None
    if known is None:
        refusal, borders = stage_fault(json.dumps(small), first, end)
        known = key.model_copy(update={"refusal": refusal[:2000], "borders": borders})
        if path is not None:
            _write(path, known)
    if known.refusal:
        refused = SplitRefusal(known.refusal, frozenset(known.borders))
        remedy = "place it on one node" if refused.forbids else "other splits may do"
        raise LoadFailed(
            f"{layer_range(first, end)} of a {key.architecture} model cannot be a stage of "
            f"their own ({known.refusal}); {remedy}",
            param=refused.param,
        )


@lru_cache(maxsize=64)
def stage_fault(small: str, first: int, end: int) -> tuple[str, tuple[int, ...]]:
    """Why layers [first, end) of a model of this (small) config cannot be a stage, and borders.

    Empty where they can. The borders are some near the planned ones at which the model can be cut
    in two; none where that would not help. On MLX's thread.
    """
    try:
        with mx.stream(trial_device()):
            return _stage_fault(cast("dict[str, Any]", json.loads(small)), first, end)
    except (LoadFailed, InvalidCard) as refused:
        return refused.message.removesuffix(ONE_NODE), ()
    except MODEL_FAULTS as raised:
        return f"its small model cannot be run: {said(raised)}", ()


def trial_device() -> mx.Device:
    """Where small models run: not on CUDA, whose products round float32 so coarsely (TF32) that a
    prompt cut otherwise seems to give other logits."""
    return mx.Device(mx.cpu) if mx.cuda.is_available() else mx.default_device()


def _stage_fault(config: dict[str, Any], first: int, end: int) -> tuple[str, tuple[int, ...]]:
    trial = Trial(small_model(config), min(_MOST_IDS, vocabulary_size(config)))
    fault = trial.fault(first, end)
    if not fault and (fault := trial.cut_fault()):
        return fault, ()
    planned = {first, end} - {0, trial.layers}
    borders = trial.borders_near(planned) if fault else ()
    # A stage between borders that are good by themselves lacks something else.
    return fault, () if planned <= set(borders) else borders


class Trial:
    """A small model with random weights, and what it computed as a whole."""

    def __init__(self, model: nn.Module, ids: int) -> None:
        """`ids`: how many there are. Raises LoadFailed and what the model's class raises."""
        self.model = model
        self._ids = ids
        self.layers = len(cast(Any, model).layers)
        self._weights = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
        whole = StageModel(model, 0, self.layers)
        self._takes_back = can_roll_back(whole.make_caches())
        self._seen = _run(whole, _whole_step, _SCHEDULE, ids, self._takes_back)
        if not all(mx.isfinite(step.logits).all().item() for step in self._seen):
            raise LoadFailed("its small model gives no finite numbers")

    def fault(self, first: int, end: int, steps: int = len(_SCHEDULE)) -> str:
        """Why the stage [first, end) does not compute what its layers did; empty where it does."""
        stage, seen = StageModel(self.model, first, end), iter(self._seen[:steps])
        self._poison(first, end)
        try:
            step_of = partial(_stage_step, seen=seen)
            _ = _run(stage, step_of, _SCHEDULE[:steps], self._ids, self._takes_back)
        except _Differs as differs:
            return str(differs)
        except LoadFailed as refused:
            return refused.message.removesuffix(ONE_NODE)
        except MODEL_FAULTS as raised:
            return f"they need more than the hidden states of the layers before: {said(raised)}"
        finally:
            _ = self.model.update(tree_unflatten(self._weights))
        return ""

    def cut_fault(self) -> str:
        """Whether the whole model's logits depend on how a prompt is cut; empty where not."""
        whole = StageModel(self.model, 0, self.layers)
        if all(_cut_error(whole, self._ids, start) > _CUT_ERROR for start in _STARTS):
            return (
                "its class gives other logits where a prompt is read in other forwards, and "
                "several nodes read it in others than one does"
            )
        return ""

    def borders_near(self, planned: Collection[int]) -> tuple[int, ...]:
        """Of the layers nearest to the planned ones, those at which the model can be cut in two."""
        by_distance = sorted(
            range(1, self.layers), key=lambda at: min(abs(at - each) for each in planned)
        )
        good = (
            at
            for at in by_distance[:_BORDERS_TRIED]
            if not self.fault(0, at, _FEW_STEPS) and not self.fault(at, self.layers, _FEW_STEPS)
        )
        return tuple(sorted(good))

    def _poison(self, first: int, end: int) -> None:
        """NaN in all that the stage must not need: other layers, and the ends if it has none."""
        layers = cast("list[nn.Module]", cast(Any, self.model).layers)
        own = {id(value) for layer in layers[first:end] for value in _values(layer)}
        inside = {id(value) for layer in layers for value in _values(layer)}
        spared = own if first else own | {id(value) for _, value in self._weights} - inside
        poisoned = [(n, v if id(v) in spared else _nan(v)) for n, v in self._weights]
        _ = self.model.update(tree_unflatten(poisoned))


T = TypeVar("T")


class _Differs(Exception):
    """A stage gave other numbers than the whole model."""


class _Seen(NamedTuple):
    """One step of the whole model."""

    notes: Notes
    logits: mx.array


def _run(
    stage: StageModel,
    step_of: Callable[[StageModel, mx.array, list[Any]], T],
    schedule: Sequence[_Step],
    ids: int,
    takes_back: bool,
) -> list[T]:
    """What `step_of` gives for every step."""
    caches = stage.make_caches()
    found: list[T] = []
    position = 0
    for step in schedule:
        found.append(step_of(stage, _tokens(position, step.rows, ids), caches))
        mx.eval(cache_arrays(caches))
        if step.back and takes_back:
            rollback(caches, step.back)
            position -= step.back
        position += step.rows
    return found


def _cut_error(whole: StageModel, ids: int, start: int) -> float:
    """How far the last logits behind a prompt that is cut are from those behind one forward."""
    ends: list[mx.array] = []
    for rows in ((sum(_CUT),), _CUT):
        caches, position, last = whole.make_caches(), start, mx.zeros(1)
        for each in rows:
            logits, _ = whole.noted(_tokens(position, each, ids), caches)
            last = logits.reshape(-1, logits.shape[-1])[-1].astype(mx.float32)
            mx.eval(last, cache_arrays(caches))
            position += each
        ends.append(last)
    one, cut = ends
    return cast("float", (mx.linalg.norm(cut - one) / mx.linalg.norm(one)).item())


def _whole_step(stage: StageModel, ids: mx.array, caches: list[Any]) -> _Seen:
    logits, notes = stage.noted(ids, caches)
    mx.eval(logits, list(notes.entered.values()), list(notes.left.values()))
    return _Seen(notes, logits)


def _stage_step(
    stage: StageModel, ids: mx.array, caches: list[Any], *, seen: Iterator[_Seen]
) -> None:
    """Raises _Differs."""
    notes, logits = next(seen)
    entering = notes.entered[stage.first] if stage.first else None
    _compare(stage.hidden(ids, entering, caches), notes.left[stage.end - 1], "hidden states")
    if not stage.first:
        last = notes.left[stage.num_layers - 1]
        _compare(stage.logits(ids, last), logits, "logits")


def _compare(found: mx.array, wanted: mx.array, what: str) -> None:
    if mx.array_equal(found, wanted).item():
        return
    if mx.isfinite(found).all().item():
        raise _Differs(f"their {what} alone differ from those in the whole model")
    raise _Differs(f"their {what} depend on weights that other stages hold")


def small_model(config: Mapping[str, Any], *, stock: bool = False) -> nn.Module:
    """With random weights that are a function of the config; `stock`: layers as mlx-lm has them."""
    config = {**config, "model_type": known_type(config["model_type"])}
    model_class, arguments = _get_classes(config)
    model: nn.Module = model_class(arguments.from_dict(config))
    flat = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    if (numbers := sum(value.size for _, value in flat)) > _MAX_NUMBERS:
        raise ValueError(f"it has {numbers} parameters however small its config.json is made")
    _ = model.update(tree_unflatten([(n, _noise(i, v)) for i, (n, v) in enumerate(flat)]))
    _ = model.eval()
    if not stock:
        prepare(model)
    return model


def _values(module: nn.Module) -> list[mx.array]:
    return [cast("mx.array", value) for _, value in tree_flatten(module.parameters())]


def _nan(value: mx.array) -> mx.array:
    floating = mx.issubdtype(value.dtype, mx.floating)
    return mx.full(value.shape, float("nan"), value.dtype) if floating else value


def _noise(index: int, value: mx.array) -> mx.array:
    """Nothing stays constant: what starts as zeros (routers) or ones (norms) would hide faults."""
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    noise = mx.random.normal(value.shape, key=mx.random.key(index))
    if value.ndim > 1:
        return noise * value.shape[-1] ** -0.5
    return value.astype(mx.float32) + 0.1 * noise


def _tokens(position: int, rows: int, ids: int) -> mx.array:
    return mx.array([[(37 * i + 11) % ids for i in range(position, position + rows)]])


def _key(small: Mapping[str, Any], first: int, end: int) -> _Stored:
    text = json.dumps(small, sort_keys=True)
    return _Stored(
        architecture=str(small.get("model_type", ""))[:200],
        config=hashlib.sha256(text.encode()).hexdigest(),
        mlx_lm=version("mlx-lm"),
        mlx=version("mlx"),
        schedule=_SCHEDULE_VERSION,
        first=first,
        end=end,
        refusal="",
        borders=(),
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
    return stored if stored.model_copy(update={"refusal": "", "borders": ()}) == key else None


def _write(path: Path, result: _Stored) -> None:
    """A disk that is full costs the file only: the class is checked again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, result.model_dump_json().encode())
    except OSError as fault:
        log.warning("the result of a check could not be saved: %s", fault.strerror)
