"""What an answer needs to go on: its rounds, its budget of resumes, its timings; and spares."""

from dataclasses import replace

import pytest
from clocks import Clock

from exo_node.node.chat.resuming import MAX_BARREN, AnswerLog
from exo_node.node.machine.timing import LAN
from exo_node.node.placements.loaded_placement import LoadedPlacement, placed_of
from exo_node.node.runners.runner_client import Endpoint
from exo_node.placement.cluster import ClusterView, NodeFacts, StageAssignment
from exo_node.placement.cost import stage_bytes
from exo_node.placement.ids import ModelId, NodeId, PlacementId
from exo_node.placement.library import packaged_cards
from exo_node.placement.plan import PlanOptions, plan
from exo_node.placement.spares import spare_node
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


def test_another_attempt_repeats_the_ids_and_forwards_that_were_handed_out() -> None:
    clock = Clock()
    answer = AnswerLog("r", LAN.chat, clock)
    asked = pb.GenerateRequest(request="r", attempt=1, messages=pb.Messages(json="[]"))
    assert answer.continues(asked) == asked
    answer.saw(pb.GenerateEvent(started=pb.Started(prompt_ids=[5, 6, 7])))
    answer.saw(delta(0, 8))
    answer.saw(delta(3, 9, 10))
    assert answer.lost()
    again = answer.continues(asked)
    assert (again.attempt, list(again.token_ids.ids)) == (2, [5, 6, 7])
    assert [list(r.tokens) for r in again.replay] == [[8], [9, 10]]
    assert [(r.forward.position, r.forward.rows) for r in again.replay] == [(0, 1), (3, 2)]
    assert asked.attempt == 1, "the request of the first attempt is not changed"


def test_a_prompt_is_announced_once_however_many_attempts_read_it() -> None:
    answer = AnswerLog("r", LAN.chat, Clock())
    assert [answer.announce() for _ in range(3)] == [True, False, False]


def test_an_answer_is_given_up_after_too_many_losses() -> None:
    answer = AnswerLog("r", LAN.chat, Clock())
    assert [answer.lost() for _ in range(MAX_BARREN + 1)] == [True] * MAX_BARREN + [False]


def test_losses_with_new_tokens_between_them_never_end_an_answer() -> None:
    answer = AnswerLog("r", LAN.chat, Clock())
    for position in range(3 * MAX_BARREN):
        assert answer.lost()
        answer.saw(delta(position, 1))


def test_an_answer_is_given_up_when_nothing_new_came_for_too_long() -> None:
    clock = Clock()
    answer = AnswerLog("r", LAN.chat, clock)
    assert answer.lost()
    clock.now += LAN.chat.resume_within_s + 1
    assert not answer.lost()
    fresh = AnswerLog("r", LAN.chat, clock)
    assert fresh.lost()
    fresh.saw(delta(0, 1))
    clock.now += LAN.chat.resume_within_s + 1
    assert fresh.lost(), "a token since the last loss begins the time anew"
    fresh.saw(pb.GenerateEvent(rebuilt=pb.Rebuilt(done=16, total=900)))
    clock.now += LAN.chat.resume_within_s + 1
    assert fresh.lost(), "so does progress through what is rebuilt"


def test_an_attempt_is_steady_once_it_has_given_tokens_for_a_while() -> None:
    clock, placed = Clock(), record(A)
    answer = AnswerLog("r", LAN.chat, clock)
    steady: list[bool] = []
    for _ in range(2):
        answer.runs_on(placed_of(placed))
        answer.saw(delta(0, 1))
        steady.append(answer.steady)
        clock.now += LAN.chat.steady_s
        answer.saw(delta(1, 1))
        steady.append(answer.steady)
    assert steady == [False, True] * 2, "each attempt shows it anew"


def test_timings_are_of_the_answer_and_not_of_its_last_attempt() -> None:
    clock = Clock()
    answer = AnswerLog("r", LAN.chat, clock)
    clock.now += 2
    answer.saw(delta(0, 1))
    for position in (3, 4, 5, 6):
        clock.now += 0.5
        answer.saw(delta(position, 1))
    assert answer.timings() == {"time_to_first_token_s": 2.0, "generation_tps": 2.0}


# ---------------------------------------------------------------- exactness


def record(*nodes: NodeId, chip: str = "Apple M3") -> LoadedPlacement:
    options = PlanOptions(min_nodes=len(nodes), max_nodes=len(nodes))
    planned = plan(CARD, view(*nodes, chip=chip), options)
    made = LoadedPlacement(PlacementId("p"), CARD, planned, options)
    made.specs = [pb.StageSpec(dtype="float32")]
    made.endpoints = [Endpoint(stage.node, pb.LoadReady()) for stage in planned.stages]
    made.see(view(*nodes, chip=chip))
    return made


def test_a_resume_is_exact_where_the_same_chips_compute_every_layer() -> None:
    answer, placed = AnswerLog("r", LAN.chat, Clock()), record(A, B)
    answer.runs_on(placed_of(placed))
    placed.see(view(C))
    placed.move(1, Endpoint(C, pb.LoadReady()))
    answer.runs_on(placed_of(placed))
    assert answer.exact
    answer.runs_on(placed_of(record(D)))
    assert answer.exact, "where the layers are cut does not change what computes them"
    placed.see(view(D, chip="Apple M1"))
    placed.move(1, Endpoint(D, pb.LoadReady()))
    answer.runs_on(placed_of(placed))
    assert not answer.exact
    answer.runs_on(placed_of(record(A, B)))
    assert not answer.exact, "what was inexact once stays so"


def test_a_resume_in_another_dtype_is_not_exact() -> None:
    answer, other = AnswerLog("r", LAN.chat, Clock()), record(A)
    answer.runs_on(placed_of(record(A)))
    other.specs = [pb.StageSpec(dtype="bfloat16")]
    answer.runs_on(placed_of(other))
    assert not answer.exact


def test_only_runners_that_failed_twice_without_a_loss_are_rebuilt_wholly() -> None:
    answer, placed = AnswerLog("r", LAN.chat, Clock()), record(A, B)
    whole: list[bool] = []
    for node in (B, C, C):
        placed.move(1, Endpoint(node, pb.LoadReady()))
        answer.runs_on(placed_of(placed))
        whole.append(answer.continues(pb.GenerateRequest()).alone)
        assert answer.lost()
    assert whole == [False, False, True], "what the first loss left is kept in the second"


# ------------------------------------------------------------------- spares

STAGES = (StageAssignment(A, 0, 6), StageAssignment(B, 6, 11), StageAssignment(C, 11, 16))
HELD = frozenset({(A, 0), (B, 1), (C, 2)})


def spare(nodes: ClusterView, stage: int, held: frozenset[tuple[NodeId, int]] = HELD) -> object:
    return spare_node(CARD, nodes, STAGES, stage, held, 4096)


def test_a_spare_goes_to_a_node_whose_loss_costs_nothing_else() -> None:
    assert [spare(view(A, B, C, D), stage) for stage in range(3)] == [D, D, D]


def test_without_such_a_node_it_goes_to_another_stages_node_and_never_to_its_own() -> None:
    assert spare(view(A, B, C), 1) in (A, C)
    assert spare(view(B), 1) is None


def test_a_node_never_holds_the_same_stage_twice() -> None:
    assert spare(view(A, B, C, D), 1, HELD | {(D, 1)}) in (A, C)


@pytest.mark.parametrize(("short", "wanted"), [(0, D), (1, None)])
def test_a_spare_needs_room_beside_what_its_node_holds_already(
    short: int, wanted: NodeId | None
) -> None:
    both = sum(
        stage_bytes(CARD, s.first_layer, s.end_layer, False, 4096, False) for s in STAGES[1:]
    )
    room = view(D, memory=both - short)
    assert spare(room, 2, HELD | {(D, 1)}) == wanted


def test_a_spare_of_the_generator_counts_what_only_the_generator_holds() -> None:
    layers = stage_bytes(CARD, 0, 6, False, 4096, False)
    whole = stage_bytes(CARD, 0, 6, True, 4096, False)
    assert layers < whole
    assert spare(view(D, memory=whole - 1), 0) is None
    assert spare(view(D, memory=whole), 0) == D


def test_equal_choices_are_ordered_by_id() -> None:
    shuffled = view(D, C, B, A)
    alone = replace(shuffled, nodes=tuple(n for n in shuffled.nodes if n.id in (C, D)))
    assert spare_node(CARD, alone, STAGES[:2], 0, frozenset({(A, 0), (B, 1)}), 4096) == C
