"""Where only rounds of a few rows compute what single steps do, answers draft no more than that,
and say so."""

from time import perf_counter
from typing import Any

import mlx.core as mx
import pytest
from chip_answers import scores
from chips import M3_MAX, on_chip
from clocks import Clock
from engines import Answer, answer, engine_of, load_quietly, request
from readers import GREEDY, SEEDED, Reader, prompt, together
from shims import Key, at_rows, perturb
from small import small_spec
from zoo import tiny_config
from zoo_runs import small

from exo_node.mtp.pieces import result_of
from exo_node.mtp.probe import Subject, exact_depth
from exo_node.mtp.targets import WholeTarget
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.kernels import row_sets
from exo_node.shard.kernels.row_groups import group_rows
from exo_node.shard.model.stage_model import StageModel
from exo_node.shard.tools.verify.main import QUICK, subject_and_prompts

MOST, DEPTH = 7, 4
TOKENS = 32
SPEC = small_spec(native_mtp=True, max_draft_tokens=MOST, context_length=1000)
REASON = (
    "at most 4 of the model's 7 drafts a round, since a verify of 6 rows does not compute what "
    "single steps do on this machine (6 rows after 24 first differ in: "
)


def served_with(key: Key, size: float = 0.2) -> TextEngine:
    """A measured engine whose products depend on `key`."""
    loaded = load_quietly(SPEC)
    assert perturb(loaded.model.model, key, size=size)
    served = engine_of(loaded, SPEC, clock=Clock(step=1e-3))  # what shares rounds depends on it
    served.measurements.measure()
    return served


@pytest.fixture(scope="module")
def limited() -> TextEngine:
    return served_with(at_rows([6, 7, 8]))


def asked(k: int, number: int = 0, **changes: Any) -> Any:
    return request(prompt(number), k, TOKENS, **({"ignore_eos": True} | changes))


@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_request_for_more_gets_what_is_exact_and_the_reason(
    limited: TextEngine, sampling: Any, adaptive: bool
) -> None:
    plain = answer(limited, asked(0, sampling=sampling))
    drafted = answer(
        limited,
        asked(MOST, sampling=sampling, adaptive_draft=adaptive, initial_draft_tokens=MOST),
    )
    assert drafted.ids == plain.ids
    assert drafted.stats.num_draft_tokens == DEPTH
    assert max(_depths(drafted)) <= DEPTH if adaptive else max(_depths(drafted)) == DEPTH
    assert REASON in drafted.stats.depth_reason
    assert drafted.end.identity == "bitwise"
    assert limited.lookup.policy.most_drafts(1) > MOST, "copies have lengths of their own"


def test_a_request_within_the_limit_is_not_changed(limited: TextEngine) -> None:
    drafted = answer(limited, asked(DEPTH - 1))
    assert max(_depths(drafted)) == drafted.stats.num_draft_tokens == DEPTH - 1
    assert REASON not in drafted.stats.depth_reason


def test_before_the_first_answer_the_limit_is_the_reason() -> None:
    assert served_with(at_rows([6])).depth_reason.startswith(REASON)
    assert served_with(at_rows([])).depth_reason == ""


def test_a_log_is_read_again_in_rows_that_are_exact(limited: TextEngine) -> None:
    whole = answer(limited, asked(0, top_logprobs=0))
    log = whole.rounds[:20]
    resumed = answer(limited, asked(MOST, replay=log, attempt=2, top_logprobs=0))
    assert [*scores(log), *scores(resumed.rounds)] == scores(whole.rounds)


def test_where_no_width_is_exact_the_head_drafts_as_before() -> None:
    served = served_with(at_rows([2, 8]), size=1e-3)
    assert served.measurements.identity == "near_tie"
    drafted = answer(served, asked(MOST))
    assert max(_depths(drafted)) == MOST
    assert "at most" not in drafted.stats.depth_reason


@pytest.mark.parametrize("most", [3, 1])
def test_requests_that_share_rounds_draft_what_is_exact_together(most: int) -> None:
    def in_batches(x: mx.array, rows: int) -> float:
        is_wide = x.shape[0] > 1 and most + 1 < x.shape[-2] <= MOST + 1
        return float(rows) if is_wide else 0.0

    served = served_with(in_batches)
    assert served.drafting.depth == MOST
    assert served.measurements.batch_identity == "bitwise"
    plain = [answer(served, asked(0, number)).ids for number in range(3)]
    readers = [Reader(asked(MOST, number)) for number in range(3)]
    together(served, readers)
    assert [tuple(reader.ids) for reader in readers] == plain
    shared = [r.drafted for reader in readers for r in reader.rounds if r.forward.batch == 3]
    assert max(shared) == most
    rounds = "rounds that 3 requests shared, which are not exact with more"
    reasons = {reader.end.stats.depth_reason for reader in readers if reader.end is not None}
    assert reasons == {f"K = {most} in {rounds}, else up to 7: as requested"}


def test_a_fixed_k_that_the_rows_of_shared_rounds_lower_is_not_said_to_hold_in_all() -> None:
    served = served_with(at_rows([]))
    readers = [Reader(asked(MOST, number)) for number in range(9)]
    together(served, readers)
    by_size = {r.forward.batch: r.drafted for reader in readers for r in reader.rounds[:2]}
    assert by_size[9] == 6
    rounds = "rounds that 9 requests shared, which have 64 rows at most"
    reasons = {reader.end.stats.depth_reason for reader in readers if reader.end is not None}
    assert reasons == {f"K = 6 in {rounds}, else up to 7: as requested"}
    assert answer(served, asked(MOST)).stats.depth_reason == "K = 7 in every round: as requested"


def test_verify_checks_the_drafts_that_a_node_would_grant() -> None:
    loaded = load_quietly(SPEC)
    assert perturb(loaded.model.model, at_rows([6, 7, 8]), size=0.2)
    named, unnamed = (subject_and_prompts(loaded, SPEC, k, QUICK)[0] for k in (MOST, 0))
    assert (named.max_k, unnamed.max_k) == (MOST, DEPTH)


@pytest.mark.parametrize(("count", "most"), [(3, 7), (9, 6)])
def test_requests_that_share_rounds_get_the_ids_that_each_gets_alone(count: int, most: int) -> None:
    """Each round keeps other numbers of their rows. Nine requests of 8 rows have more than 64."""
    served = served_with(at_rows([]))
    readers = [
        Reader(asked(MOST, number, sampling=SEEDED if number % 3 == 2 else GREEDY), begins=number)
        for number in range(count)
    ]
    together(served, readers)
    for number, reader in enumerate(readers):
        plain = asked(0, number, sampling=reader.request.sampling)
        assert tuple(reader.ids) == answer(served, plain).ids
    rounds = [each for reader in readers for each in reader.rounds]
    shared = [each for each in rounds if each.forward.batch == count]
    assert max(each.drafted for each in shared) == most
    assert len({each.accepted for each in shared}) > 2
    assert max(each.forward.batch * each.forward.rows for each in rounds[count:]) <= 64


@pytest.mark.parametrize(("heads", "depth"), [(8, 3), (6, 4), (4, 7)])
def test_attention_of_a_chip_ends_the_depth(
    heads: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metal's attention for few rows takes 32 rows times query heads of a key head at most; here
    the engine's own remedy, which calls it for fewer rows, is not in the model."""
    monkeypatch.setattr(row_sets, "VALUES", 64)
    config = {**tiny_config("llama"), "num_attention_heads": heads, "num_key_value_heads": 1}
    with on_chip(M3_MAX):
        model: Any = small({**config, "vocab_size": 160})
        stage = StageModel(model, 0, len(model.layers))
        _ = group_rows(stage.own_modules(outer=True), mx.float32, perf_counter)
        subject = Subject(WholeTarget(model), stage.make_caches, 160, 1000, lambda: 0.0)
        assert result_of(exact_depth(subject, MOST)) == depth


def _depths(drafted: Answer) -> list[int]:
    return [round_.drafted for round_ in drafted.rounds]
