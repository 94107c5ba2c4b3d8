"""The times of a stage's layers: the minimum of a few runs, within a budget."""

import itertools
import math
import time
from collections.abc import Callable

import mlx.core as mx
import pytest
from engines import load_quietly, spec

from exo_node.shard.model import layer_probe
from exo_node.shard.model.layer_probe import BUDGET_S, LayerTimes, probe_layers
from exo_node.shard.model.stage_model import StageModel

HIDDEN = 256


class SlowModel:
    """A `StageModel`'s shape with a clock that its forwards turn: no time but what they say."""

    def __init__(
        self, per_row_s: float, per_forward_s: float = 0.0, compiling_s: float = 0.0
    ) -> None:
        self.now = 100.0
        self.rows: list[int] = []
        self._per_row_s = per_row_s
        self._per_forward_s = per_forward_s
        self._compiling_s = compiling_s

    def clock(self) -> float:
        return self.now

    def ran(self, rows: int, layers: int) -> None:
        self.rows.append(rows)
        is_first = self.rows.count(rows) == 1
        self.now += (self._per_forward_s + rows * self._per_row_s) * layers
        self.now += self._compiling_s if is_first else 0.0


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[SlowModel], LayerTimes]:
    stage = load_quietly(spec(first=4, end=16, stage=1, num_stages=2)).model

    def timed(model: SlowModel, drafts: int = 3) -> LayerTimes:
        def hidden(
            self: StageModel, tokens: mx.array, entering: mx.array, _caches: object
        ) -> mx.array:
            model.ran(tokens.shape[1], self.end - self.first)
            return entering

        monkeypatch.setattr(StageModel, "hidden", hidden)
        return probe_layers(stage, HIDDEN, mx.float32, model.clock, drafts=drafts, tail=False)

    return timed


def test_a_layers_time_is_the_least_of_its_runs(slow: Callable[[SlowModel], LayerTimes]) -> None:
    model = SlowModel(per_row_s=1e-6, per_forward_s=1e-4)
    times = slow(model)
    assert times.decode_s == pytest.approx(1.01e-4)
    assert times.verify_s == pytest.approx(1.04e-4)
    assert times.prefill_s == pytest.approx(1e-4 + 512e-6)
    assert (times.verify_rows, times.prefill_rows, times.tail_s) == (4, 512, 0.0)
    assert model.now - 100.0 < BUDGET_S


def test_a_machine_too_slow_for_a_chunk_has_it_estimated(
    slow: Callable[[SlowModel], LayerTimes],
) -> None:
    model = SlowModel(per_row_s=1e-3)
    times = slow(model)
    assert 512 not in model.rows
    assert times.prefill_s == pytest.approx(512e-3), "by fewer rows"
    assert times.decode_s > 0 < times.verify_s
    assert model.rows.count(1) <= layer_probe.REPEATS + 1


def test_the_budget_bounds_the_runs(slow: Callable[[SlowModel], LayerTimes]) -> None:
    model = SlowModel(per_row_s=1.0)
    _ = slow(model)
    assert [len(list(group)) for _, group in itertools.groupby(model.rows)] == [2, 2, 2]


def test_what_compiling_takes_is_no_layers_time(slow: Callable[[SlowModel], LayerTimes]) -> None:
    model = SlowModel(per_row_s=1e-6, per_forward_s=1e-4, compiling_s=10.0)
    times = slow(model)
    assert times.decode_s == pytest.approx(1.01e-4)
    assert times.verify_s == pytest.approx(1.04e-4)


def test_a_gpus_chunk_is_timed_whole(
    slow: Callable[[SlowModel], LayerTimes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.DeviceType.gpu))
    model = SlowModel(per_row_s=1e-7, per_forward_s=5e-3, compiling_s=1.0)
    times = slow(model)
    assert set(model.rows) == {1, 4, 512}
    assert times.prefill_s == pytest.approx(5e-3 + 512e-7)


@pytest.mark.parametrize(("drafts", "rows"), [(0, 4), (2, 3)])
def test_a_model_without_drafts_is_timed_at_the_rows_of_three(
    slow: Callable[..., LayerTimes], drafts: int, rows: int
) -> None:
    assert slow(SlowModel(per_row_s=1e-6), drafts).verify_rows == rows


@pytest.mark.parametrize(("first", "tail"), [(0, True), (8, False)])
def test_the_demos_stage_is_timed_and_left_as_it_was(first: int, tail: bool) -> None:
    loaded = load_quietly(spec(first=first, stage=int(first > 0), num_stages=2, end=first + 8))
    times = probe_layers(
        loaded.model, HIDDEN, mx.float32, time.perf_counter, drafts=3, tail=tail, chunk=32
    )
    figures = (times.decode_s, times.verify_s, times.prefill_s)
    assert all(math.isfinite(figure) and figure > 0 for figure in figures)
    assert (times.tail_s > 0) == tail
    assert len(loaded.model.make_caches()) == 8
