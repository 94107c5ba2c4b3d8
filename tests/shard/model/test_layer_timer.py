"""What a stage's layers take at work: what counts, and how the next placement heeds it."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from clocks import Clock
from engines import ORACLE, answer, load_quietly, request, spec, split_engine
from models import make_checkpoint
from runners import eventually

from exo_node.node.cluster.member_facts import MemberFacts
from exo_node.node.links.layer_profiles import LayerProfiles
from exo_node.node.links.measurements import Profiling
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.tasks import Loops
from exo_node.node.machine.timing import LOCAL, LinkTiming
from exo_node.node.placements.planner_view import NodeFactsSource
from exo_node.placement.cluster import ClusterView
from exo_node.placement.correction import FADE_S, FIRST, HALF_LIFE, WINDOW
from exo_node.placement.cost import stage_bytes
from exo_node.placement.ids import ModelId, NodeId
from exo_node.placement.library import packaged_cards
from exo_node.placement.options import PlanOptions
from exo_node.placement.plan import plan
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.engine import TextEngine
from exo_node.shard.model.layer_probe import ProbeRows, probe_layers
from exo_node.shard.model.layer_timer import CHUNK_ROWS, FEWEST_LAYERS, SHORT_CONTEXT, LayerTimer
from exo_node.shard.model.load import Loaded
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.model.tensors import to_bytes
from exo_node.shard.pipeline import stage as stage_module
from exo_node.shard.pipeline import verifier as pipeline_module
from exo_node.shard.pipeline.frames import HiddenBlock
from exo_node.shard.pipeline.stage import StageWorker

DEMO = packaged_cards()[ModelId("demo")]
ROWS = ProbeRows(verify=4, prefill=16)
HIDDEN = 64
LAYER_S = 1e-3
ENOUGH = WINDOW * (1 + FIRST)


# ---------------------------------------------------------------------------- the meter


def measured(meter: LayerTimer, clock: Clock, position: int, rows: int, count: int) -> None:
    """So many forwards of a second for each layer of eight."""
    for _ in range(count):
        begun = meter.now()
        clock.now += 8.0
        meter.add(position, rows, begun)


def test_a_figure_is_of_one_layer_and_of_one_number_of_rows() -> None:
    clock = Clock()
    meter = LayerTimer(8, (1, 4), clock)
    measured(meter, clock, 0, 1, ENOUGH)
    measured(meter, clock, 0, 3, ENOUGH)
    measured(meter, clock, 0, 4, ENOUGH - 1)
    assert meter.means() == [pb.LayerMean(rows=1, seconds=1.0, count=FIRST * WINDOW)]


def test_forwards_behind_a_long_context_do_not_count() -> None:
    clock = Clock()
    meter = LayerTimer(8, (1,), clock)
    measured(meter, clock, SHORT_CONTEXT, 1, ENOUGH)
    assert meter.means() == []
    measured(meter, clock, SHORT_CONTEXT - 1, 1, ENOUGH)
    assert len(meter.means()) == 1


def test_a_stage_of_few_layers_does_not_measure() -> None:
    clock = Clock()
    few, enough = LayerTimer(FEWEST_LAYERS - 1, (1,), clock), LayerTimer(FEWEST_LAYERS, (1,), clock)
    for meter in (few, enough):
        measured(meter, clock, 0, 1, ENOUGH)
    assert (few.means(), len(enough.means())) == ([], 1)


def test_a_chunk_is_an_observation_by_itself() -> None:
    clock = Clock()
    meter = LayerTimer(8, (CHUNK_ROWS,), clock)
    measured(meter, clock, 0, CHUNK_ROWS, 1 + FIRST)
    assert [mean.count for mean in meter.means()] == [FIRST]


# ------------------------------------------------------------------------------ a stage


def block(position: int, rows: int, reply: "pb.Reply.ValueType", *schedule: int) -> HiddenBlock:
    data = to_bytes(mx.zeros((1, rows, HIDDEN)))
    return HiddenBlock("r1", 1, position, rows, (7,) * rows, reply, data, schedule)


@dataclass
class Meter(LayerTimer):
    """Notes what it is told of."""

    added: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def __post_init__(self) -> None:
        super().__init__()

    def add(self, position: int, rows: int, begun: float) -> None:
        self.added.append((position, rows))


@pytest.mark.parametrize("last", [True, False])
def test_only_forwards_that_are_computed_whole_count(checkpoint: Path, last: bool) -> None:
    """The last stage evaluates caches alone where nobody reads its rows."""
    end = 16 if last else 12
    loaded = load_quietly(spec(checkpoint, 8, end, stage=1, num_stages=2 if last else 3))
    worker = StageWorker(loaded.model, loaded.expected, lambda: 0.0)
    loaded.model.meter = meter = Meter()
    _ = worker.forward(block(0, 4, pb.REPLY_NONE))
    _ = worker.forward(block(4, 4, pb.REPLY_LAST))
    _ = worker.forward(block(8, 1, pb.REPLY_ALL))
    _ = worker.forward(block(9, 3, pb.REPLY_NONE if not last else pb.REPLY_ALL, 1, 1, 1))
    assert meter.added == [*([] if last else [(0, 4)]), (4, 4), (8, 1)]


# -------------------------------------------------------------------- a pipeline of two


@dataclass
class Pipeline:
    """A small model in two halves, each layer of which turns a clock by LAYER_S, or by its own."""

    clock: Clock
    engine: TextEngine
    loaded: list[Loaded]
    seconds: dict[int, float]
    """Of a layer, by its id, where it is another than LAYER_S."""

    def probe(self, stage: int) -> pb.LayerTimes:
        model = self.loaded[stage].model
        found = probe_layers(model, HIDDEN, mx.float32, ROWS, self.clock, tail=False)
        return pb.LayerTimes(
            model="demo",
            dtype="float32",
            decode_s=found.decode_s,
            verify_s=found.verify_s,
            verify_rows=found.verify_rows,
            prefill_s=found.prefill_s,
            prefill_rows=found.prefill_rows,
        )

    def slow_down(self, stage: int, seconds: float) -> None:
        """A seeded delay in one layer of a stage."""
        model = self.loaded[stage].model
        self.seconds[id(layers_of(model)[model.first])] = seconds

    def decode(self, forwards: int) -> None:
        """An answer of so many forwards of one row, after its prompt."""
        wanted = request(ORACLE[0]["prompt_ids"], max_tokens=forwards + 1, ignore_end=True)
        assert len(answer(self.engine, wanted).ids) == forwards + 1

    def decode_s(self, stage: int) -> float:
        [mean] = [m for m in self.loaded[stage].model.meter.means() if m.rows == 1]
        return mean.seconds


def layers_of(model: StageModel) -> list[Any]:
    whole: Any = model.model
    return whole.layers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen layers that tell a token in little time: what each takes is said here."""
    folder = tmp_path_factory.mktemp("layers") / "model"
    return make_checkpoint(folder, "llama", dtype="float32", layers=16, hidden=HIDDEN, vocab=4096)


@pytest.fixture(scope="module")
def halves(checkpoint: Path) -> tuple[TextEngine, list[Loaded]]:
    engine, _, loaded = split_engine((0, 8, 16), folder=checkpoint)
    return engine, loaded


@pytest.fixture
def pipeline(halves: tuple[TextEngine, list[Loaded]], monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    clock, seconds = Clock(), dict[int, float]()
    engine, loaded = halves
    kind: Any = layers_of(loaded[0].model)[0].__class__
    compute = kind.__call__

    def timed(layer: object, *args: object, **kwargs: object) -> object:
        clock.now += seconds.get(id(layer), LAYER_S)
        return compute(layer, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", timed)
    for each in loaded:
        each.model.meter = LayerTimer(8, (1, ROWS.verify, ROWS.prefill), clock)
    return Pipeline(clock, engine, loaded, seconds)


def test_layers_are_timed_up_to_their_evaluation_and_nothing_after_it(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both stages: neither the other's time, nor lm_head, nor the hop counts."""
    clock, send, logits = pipeline.clock, pipeline_module.PipelineVerifier._send, StageModel.logits  # pyright: ignore[reportPrivateUsage]

    def evaluated(array: mx.array) -> bytes:
        clock.now += 8 * LAYER_S
        return to_bytes(array)

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            clock.now += 100.0
            return function(*args)

        return called

    for module in (stage_module, pipeline_module):
        monkeypatch.setattr(module, "to_bytes", evaluated)
    monkeypatch.setattr(pipeline_module.PipelineVerifier, "_send", late(send))
    monkeypatch.setattr(StageModel, "logits", late(logits))
    pipeline.decode(ENOUGH)
    assert [pipeline.decode_s(stage) for stage in (0, 1)] == [pytest.approx(2 * LAYER_S)] * 2


def test_a_stage_that_grows_slow_is_followed_and_the_other_stays(pipeline: Pipeline) -> None:
    pipeline.decode(ENOUGH)
    assert pipeline.decode_s(1) == pytest.approx(LAYER_S)
    pipeline.slow_down(1, 17 * LAYER_S)
    pipeline.decode(HALF_LIFE * WINDOW)
    assert pipeline.decode_s(0) == pytest.approx(LAYER_S)
    assert pipeline.decode_s(1) == pytest.approx(2 * LAYER_S, rel=0.05), "half the way to 3"


# --------------------------------------------------------------------- the next placement


@dataclass
class Machine:
    """One node's profiling, with a runner that says what a stage's meter knows."""

    name: str
    folder: Path
    pipeline: Pipeline
    stage: int
    loop: asyncio.Runner
    timing: LinkTiming = LOCAL.links

    def __post_init__(self) -> None:
        self.profiling = self.started()
        self.spec = spec(first=8 * self.stage, end=8 * self.stage + 8, stage=self.stage)

    def started(self) -> Profiling:
        profiles = LayerProfiles(self.folder, "cpu", "1", self.pipeline.clock)
        nothing: Any = Nothing()
        clock = self.pipeline.clock
        return Profiling(NodeId(self.name), [], profiles, nothing, clock, self.timing)

    def load(self) -> None:
        """The spec then says whether a probe was asked for."""

        async def ready() -> pb.LoadReady:
            return pb.LoadReady(layers=self.pipeline.probe(self.stage))

        async def load() -> None:
            self.profiling.start(lambda: (), self.reports, Loops(EventLog(), LOCAL.loops))
            _ = await self.profiling.load(self.spec, "f1", ready)

        self.loop.run(load())

    def restart(self) -> None:
        """The node's process; its runner is gone with it."""
        self.loop.run(self.profiling.close())
        self.profiling = self.started()
        self.pipeline.loaded[self.stage].model.meter = LayerTimer(8, (1,), self.pipeline.clock)

    def reports(self) -> list[tuple[pb.StageSpec, pb.RunnerState]]:
        means = self.pipeline.loaded[self.stage].model.meter.means()
        return [(self.spec, pb.RunnerState(layers=means))]

    def facts(self) -> pb.NodeFacts:
        """Room for twelve of the demo's sixteen layers, the ends among them."""
        room = stage_bytes(DEMO, 0, 12, generator=True, context=512, mtp=False)
        self.profiling.learn()
        return self.profiling.tell(pb.NodeFacts(id=self.name, name=self.name, memory_bytes=room))


class Nothing:
    """A client of links that nobody measures."""

    async def measure(self) -> None: ...


@pytest.fixture
def machines(pipeline: Pipeline, tmp_path: Path) -> Iterator[list[Machine]]:
    with asyncio.Runner() as loop:
        pair = [Machine(name, tmp_path / name, pipeline, i, loop) for i, name in enumerate("ab")]
        for each in pair:
            each.load()
        yield pair
        for each in pair:
            loop.run(each.profiling.close())


def view(machines: list[Machine]) -> ClusterView:
    facts = [MemberFacts(machine.facts()) for machine in machines]
    nothing: Any = None
    source = NodeFactsSource(NodeId("a"), lambda: facts, lambda: NodeId("a"), nothing, nothing)
    return source.view(ModelId("demo"))


def layers(machines: list[Machine]) -> dict[str, int]:
    """Where the demo would be placed now, by layers."""
    placement = plan(DEMO, view(machines), PlanOptions(context=512))
    return {stage.node: stage.end_layer - stage.first_layer for stage in placement.stages}


def seconds_a_token(placed: dict[str, int], truly: dict[str, float]) -> float:
    """What a token takes through so many layers of each node, by what a layer truly takes."""
    return sum(count * truly[node] for node, count in placed.items())


def test_a_correction_makes_the_next_placement_quicker_than_the_probe_would(
    machines: list[Machine], pipeline: Pipeline
) -> None:
    """Why layer times are learnt at work: a node that grew slow, as one whose GPU is shared."""
    pipeline.slow_down(1, 17 * LAYER_S)
    truly = {"a": LAYER_S, "b": (17 + 7) / 8 * LAYER_S}
    by_probe = layers(machines)
    pipeline.decode(ENOUGH)
    by_work = layers(machines)
    assert seconds_a_token(by_work, truly) < 0.7 * seconds_a_token(by_probe, truly)


def test_asking_for_facts_learns_nothing(machines: list[Machine], pipeline: Pipeline) -> None:
    pipeline.slow_down(1, 17 * LAYER_S)
    pipeline.decode(ENOUGH)
    slow = machines[1].profiling
    for _ in range(3):
        [times] = slow.tell(pb.NodeFacts()).profiles
        assert not times.corrected
    slow.learn()
    [times] = slow.tell(pb.NodeFacts()).profiles
    assert times.corrected


def test_a_node_learns_by_itself(machines: list[Machine], pipeline: Pipeline) -> None:
    slow = machines[1]
    slow.loop.run(slow.profiling.close())
    slow.timing = replace(LOCAL.links, learn_every_s=0.01)
    slow.profiling = slow.started()
    slow.load()
    pipeline.decode(ENOUGH)
    told = slow.profiling
    slow.loop.run(eventually(lambda: bool(told.tell(pb.NodeFacts()).profiles[0].corrected), 180))


def test_a_stage_that_grew_slow_gets_fewer_layers_at_the_next_placement(
    machines: list[Machine], pipeline: Pipeline
) -> None:
    assert layers(machines) == {"a": 8, "b": 8}
    pipeline.decode(ENOUGH)
    assert layers(machines) == {"a": 8, "b": 8}, "nothing changed"
    pipeline.slow_down(1, 17 * LAYER_S)
    pipeline.decode(ENOUGH)
    assert layers(machines) == {"a": 13, "b": 3}
    [times] = machines[1].facts().profiles
    assert times.decode_s == pytest.approx(LAYER_S), "the probe stays as it was"
    # It can only be found out by work, which the slow one gets less of: time brings it back.
    pipeline.clock.now += 10 * FADE_S
    assert layers(machines) == {"a": 8, "b": 8}


def test_a_correction_outlives_the_process_and_the_next_runner_replaces_it(
    machines: list[Machine], pipeline: Pipeline
) -> None:
    pipeline.slow_down(1, 17 * LAYER_S)
    pipeline.decode(ENOUGH)
    assert layers(machines) == {"a": 13, "b": 3}
    slow = machines[1]
    slow.restart()
    pipeline.seconds.clear()
    pipeline.clock.now += 60.0
    assert layers(machines) == {"a": 13, "b": 3}
    # A runner that has said nothing yet changes nothing, and what it finds out counts alone.
    slow.spec.measure_layers = True
    slow.load()
    assert not slow.spec.measure_layers
    assert layers(machines) == {"a": 13, "b": 3}
    pipeline.decode(ENOUGH)
    assert layers(machines) == {"a": 8, "b": 8}
    [times] = slow.facts().profiles
    assert [mean.count for mean in times.corrected if mean.rows == 1] == [FIRST * WINDOW]


def test_a_node_that_is_killed_keeps_what_was_saved_now_and_then(
    machines: list[Machine], pipeline: Pipeline
) -> None:
    slow = machines[1]
    slow.loop.run(slow.profiling.close())
    slow.timing = replace(LOCAL.links, save_every_s=0.01)
    slow.profiling = slow.started()
    slow.load()
    pipeline.decode(ENOUGH)
    told = slow.facts().profiles
    assert told[0].corrected
    slow.loop.run(eventually(lambda: slow.started().tell(pb.NodeFacts()).profiles == told, 180))
