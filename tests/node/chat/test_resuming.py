"""What an answer needs to go on: its rounds, its budget of resumes, its timings."""

from dataclasses import replace

from clocks import Clock

from exo_node.node.chat.resuming import MAX_BARREN_EVER, AnswerLog
from exo_node.node.machine.timing import LAN
from exo_node.node.placements.loaded_placement import LoadedPlacement, placed_of
from exo_node.node.placements.situation import ObservedPlacement
from exo_node.node.placements.state import Epoch, RunnerKey, StagedPlan, StageRunner
from exo_node.placement.cluster import ClusterView, NodeFacts
from exo_node.placement.ids import ModelId, NodeId, PlacementId
from exo_node.placement.library import packaged_cards
from exo_node.placement.options import PlanOptions
from exo_node.placement.plan import plan
from exo_node.proto import peer_pb2 as pb

CARD = packaged_cards()[ModelId("demo")]
A, B, C, D = (NodeId(letter * 20) for letter in "abcd")


def delta(position: int, *tokens: int) -> pb.GenerateEvent:
    forward = pb.Forward(position=position, rows=len(tokens))
    return pb.GenerateEvent(delta=pb.Delta(round=pb.Round(tokens=tokens, forward=forward)))


def view(*names: NodeId, chip: str = "Apple M3", memory: int = 10**10) -> ClusterView:
    facts = [NodeFacts(name, name, memory, 1e11, backend="metal", chip=chip) for name in names]
    return ClusterView(tuple(facts))


# ------------------------------------------------------------------- the log


def test_what_a_prompt_scored_is_handed_out_once_over_all_attempts() -> None:
    """The next attempt reads the prompt again, perhaps by other forwards."""
    answer = AnswerLog("r", LAN, Clock())
    scores = [pb.TokenLogprob(id=number) for number in range(6)]
    handed_out = list[int]()
    for parts in ((scores[:2], scores[2:3]), (scores[:1], scores[1:5]), (scores,)):
        answer.runs_on(pb.Placed())
        for part in parts:
            handed_out += [one.id for one in answer.new_prompt_logprobs(part)]
    assert handed_out == [0, 1, 2, 3, 4, 5]


def test_another_attempt_repeats_the_ids_and_forwards_that_were_handed_out() -> None:
    clock = Clock()
    answer = AnswerLog("r", LAN, clock)
    wire = pb.GenerateRequest(request="r", attempt=1, messages=pb.Messages(json="[]"))
    assert answer.continues(wire) == wire
    answer.saw(pb.GenerateEvent(started=pb.Started(prompt_ids=[5, 6, 7])))
    answer.saw(delta(0, 8))
    answer.saw(delta(3, 9, 10))
    assert answer.lost()
    again = answer.continues(wire)
    assert (again.attempt, list(again.token_ids.ids)) == (2, [5, 6, 7])
    assert [list(r.tokens) for r in again.replay] == [[8], [9, 10]]
    assert [(r.forward.position, r.forward.rows) for r in again.replay] == [(0, 1), (3, 2)]
    assert wire.attempt == 1, "the request of the first attempt is not changed"


def test_another_attempt_wants_the_embeddings_that_are_missing() -> None:
    clock = Clock()
    answer = AnswerLog("r", LAN, clock)
    inputs = [pb.EmbeddingInput(index=index, text=f"text {index}") for index in range(3)]
    wire = pb.GenerateRequest(attempt=1, embeddings=pb.Embeddings(inputs=inputs, dimensions=8))
    assert answer.continues(wire) == wire
    for index, tokens in ((2, 7), (0, 5)):
        answer.saw(pb.GenerateEvent(embedded=pb.Embedded(index=index, tokens=tokens)))
    assert answer.lost()
    again = answer.continues(wire)
    assert [each.index for each in again.embeddings.inputs] == [1]
    assert (again.attempt, again.embeddings.dimensions) == (2, 8)
    assert len(wire.embeddings.inputs) == 3, "the request of the first attempt is not changed"
    assert answer.embedded == {2: 7, 0: 5}
    answer.saw(pb.GenerateEvent(embedded=pb.Embedded(index=1, tokens=3)))
    assert answer.lost(), "each attempt brought something new"
    rest = answer.continues(wire)
    assert rest.WhichOneof("prompt") == "embeddings" and not rest.embeddings.inputs


def test_an_answer_is_given_up_after_losses_in_a_row_that_bring_nothing_new() -> None:
    clock = Clock()
    answer = AnswerLog("r", LAN, clock)
    assert [answer.lost() for _ in range(4)] == [True, True, True, False]
    fresh = AnswerLog("r", LAN, clock)
    for _ in range(2):
        assert [fresh.lost() for _ in range(3)] == [True] * 3
        fresh.saw(delta(0, 1))
    assert fresh.lost(), "a token since the last loss begins the count anew"


def test_losses_far_between_end_an_answer_only_in_the_end() -> None:
    """Each may be another process that was killed, while the nodes live."""
    clock = Clock()
    answer = AnswerLog("r", LAN, clock)
    survived = 0
    while answer.lost():
        survived += 1
        clock.now += LAN.stall_s / 2
    assert survived == MAX_BARREN_EVER


def test_an_attempt_is_steady_once_it_has_given_tokens_for_a_while() -> None:
    clock, placed = Clock(), record(A)
    answer = AnswerLog("r", LAN, clock)
    steady: list[bool] = []
    for _ in range(2):
        answer.runs_on(placed_of(placed))
        answer.saw(delta(0, 1))
        steady.append(answer.steady)
        clock.now += LAN.steady_s
        answer.saw(delta(1, 1))
        steady.append(answer.steady)
    assert steady == [False, True] * 2, "each attempt shows it anew"


def test_timings_are_of_the_answer_and_not_of_its_last_attempt() -> None:
    clock = Clock()
    answer = AnswerLog("r", LAN, clock)
    clock.now += 2
    answer.saw(delta(0, 1))
    for position in (3, 4, 5, 6):
        clock.now += 0.5
        answer.saw(delta(position, 1))
    assert answer.timings() == {"time_to_first_token_s": 2.0, "generation_tps": 2.0}


def test_the_wait_for_a_load_is_told_apart_from_the_time_to_the_first_token() -> None:
    clock = Clock()
    answer = AnswerLog("r", LAN, clock)
    for _ in range(4):
        clock.now += 10
        answer.waits_for_load()
    clock.now += 0.5
    answer.saw(delta(0, 1))
    assert answer.load_s == 40 and answer.timings()["time_to_first_token_s"] == 0.5
    assert answer.lost()
    answer.waits_for_load()
    assert answer.load_s == 40, "the load of a lost stage is part of the resumption"


# ---------------------------------------------------------------- exactness


def record(*nodes: NodeId, chip: str = "Apple M3", dtype: str = "float32") -> LoadedPlacement:
    options = PlanOptions(min_nodes=len(nodes), max_nodes=len(nodes))
    planned = plan(CARD, view(*nodes, chip=chip), options)
    staged = StagedPlan(replace(planned, dtype=dtype), options, (0,) * len(planned.stages))
    made = LoadedPlacement(PlacementId("p"), CARD, staged)
    made.chips = dict.fromkeys((A, B, C, D), f"metal {chip}")
    made.placement = ObservedPlacement(made.id, staged, {}, ())
    for number, stage in enumerate(planned.stages):
        move(made, number, stage.node)
    return made


def move(made: LoadedPlacement, stage: int, node: NodeId) -> None:
    """Another runner owns the stage from now on."""
    assert made.placement is not None
    key = RunnerKey(node, made.id, stage)
    runner = StageRunner(key, made.staged, "ready", 0.0, Epoch(1, 1, "a"), ready=pb.LoadReady())
    made.placement = replace(made.placement, owners={**made.owners, stage: runner})


def test_a_resume_is_exact_where_the_same_chips_compute_every_layer() -> None:
    answer, placed = AnswerLog("r", LAN, Clock()), record(A, B)
    answer.runs_on(placed_of(placed))
    move(placed, 1, C)
    answer.runs_on(placed_of(placed))
    assert answer.exact
    answer.runs_on(placed_of(record(D)))
    assert answer.exact, "where the layers are cut does not change what computes them"
    placed.chips = {**placed.chips, D: "metal Apple M1"}
    move(placed, 1, D)
    answer.runs_on(placed_of(placed))
    assert not answer.exact
    answer.runs_on(placed_of(record(A, B)))
    assert not answer.exact, "what was inexact once stays so"


def test_a_resume_in_another_dtype_is_not_exact() -> None:
    answer, other = AnswerLog("r", LAN, Clock()), record(A, dtype="bfloat16")
    answer.runs_on(placed_of(record(A)))
    answer.runs_on(placed_of(other))
    assert not answer.exact


def test_only_runners_that_failed_twice_without_a_loss_are_rebuilt_wholly() -> None:
    answer, placed = AnswerLog("r", LAN, Clock()), record(A, B)
    whole: list[bool] = []
    for node in (B, C, C):
        move(placed, 1, node)
        answer.runs_on(placed_of(placed))
        whole.append(answer.continues(pb.GenerateRequest()).sharing.alone)
        assert answer.lost()
    assert whole == [False, False, True], "what the first loss left is kept in the second"
