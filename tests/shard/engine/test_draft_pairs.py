"""A head and a block drafter in memory together: each drafts what it drafts alone, of one answer
the one and of the next the other."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from drafters import drafter_config, force, make_drafter
from engines import Answer, answer, engine_of, load_quietly, request, spec
from models import make_checkpoint
from readers import GREEDY, PROMPTS, SEEDED, Reader, both_ways, together
from small import fit_head

from exo_node.mtp.sampler import Sampler
from exo_node.mtp.types import DrafterKind, Sampling
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.drafter import Drafter, DraftModel
from exo_node.shard.engine.states.state import DraftState
from exo_node.shard.model.draft_pair import DraftPair

_KEPT = tempfile.TemporaryDirectory(prefix="exo-pairs-")
PROMPT, TOKENS = PROMPTS[0], 40
KINDS: list[DrafterKind] = ["block_drafter", "native_mtp"]


@functools.cache
def folder(family: Any) -> Path:
    made = make_checkpoint(
        Path(_KEPT.name) / family, family, dtype="float32", vocab=4096, raw=False
    )
    fit_head(made)
    return made


@functools.cache
def drafter_folder() -> Path:
    return make_drafter(Path(_KEPT.name) / "drafter", drafter_config(4096))


def spec_of(
    family: str, *, head: bool = True, drafter: bool = True, **changes: Any
) -> pb.StageSpec:
    fields: dict[str, Any] = {"native_mtp": head or drafter, "max_draft_tokens": 7}
    if drafter:
        paths = {"drafter_path": str(drafter_folder()), "drafter_bytes": 1 << 20}
        fields |= {"drafter": "a/drafter", **paths}
    if not head:
        fields["mtp_hidden"] = ""
    return spec(folder(family), 0, 4, num_layers=4, **fields, **changes)


def engine(
    kind: DrafterKind, family: str = "qwen3_5", *, ahead: bool | None = None, **changes: Any
) -> TextEngine:
    """Both together, of which `kind` drafts."""
    stage_spec = spec_of(family, **changes)
    it = load_quietly(stage_spec)
    assert isinstance(it.head, DraftPair)
    return drafting(kind, engine_of(it, stage_spec, runs_ahead=ahead, clock=lambda: 0.0))


def drafting(kind: DrafterKind, served: TextEngine) -> TextEngine:
    served.measurements.batch_identity = "bitwise"
    served.drafting.comparison.kind = kind
    return served


@functools.cache
def alone(
    kind: DrafterKind, family: str, k: int, sampling: Sampling = GREEDY, ahead: bool | None = None
) -> Answer:
    """With the one or the other alone."""
    is_head = kind == "native_mtp"
    stage_spec = spec_of(family, head=is_head, drafter=not is_head)
    served = engine_of(load_quietly(stage_spec), stage_spec, runs_ahead=ahead)
    return answer(served, request(PROMPT, k, TOKENS, sampling=sampling))


@pytest.mark.parametrize(
    ("family", "sampling", "ahead"),
    [
        ("qwen3_5", GREEDY, False),
        ("qwen3_5", SEEDED, True),
        ("deepseek_v3", GREEDY, True),
        ("deepseek_v32", GREEDY, False),  # its head has two caches
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_each_drafts_the_rounds_that_it_drafts_alone(
    kind: DrafterKind, family: str, sampling: Sampling, ahead: bool
) -> None:
    served = engine(kind, family, ahead=ahead)
    for k in (2, 7):
        own = alone(kind, family, k, sampling, ahead)
        got = answer(served, request(PROMPT, k, TOKENS, sampling=sampling))
        assert got.ids == own.ids == alone(kind, family, 0, sampling, ahead).ids
        assert [r.accepted for r in got.rounds] == [r.accepted for r in own.rounds]
        assert got.stats.drafter_kind == kind
    head = alone("native_mtp", family, 2, sampling, ahead)
    assert head.stats.accepted_draft_tokens > 10


@both_ways
@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_share_rounds_have_the_ids_that_they_have_alone(
    kind: DrafterKind, *, ahead: bool
) -> None:
    served = engine(kind, ahead=ahead)
    prompts = [PROMPTS[i] for i in range(3)]
    plain = [answer(served, request(prompt, 0, TOKENS)).ids for prompt in prompts]
    readers = [Reader(request(prompt, 3, TOKENS), begins=2 * i) for i, prompt in enumerate(prompts)]
    together(served, [*readers, Reader(request(prompts[0], 3, TOKENS), 3, ends=9)])
    assert [tuple(reader.ids) for reader in readers] == plain
    assert all(r.end is not None and r.end.stats.batched_tokens for r in readers)
    assert served.live_requests == 0


def test_an_answer_begins_with_rows_that_the_other_one_left() -> None:
    long = [*PROMPTS[1], *PROMPTS[2]] * 2
    served = engine("native_mtp", prefix_cache_bytes=64 << 20, prefill_chunk=16)
    first = answer(served, request(long, 3, TOKENS))
    again = answer(served, request(long, 3, TOKENS))
    other = answer(drafting("block_drafter", served), request(long, 3, TOKENS))
    back = answer(drafting("native_mtp", served), request(long, 3, TOKENS))
    kinds = [each.stats.drafter_kind for each in (first, again, other, back)]
    assert kinds == ["native_mtp", "native_mtp", "block_drafter", "native_mtp"]
    assert first.ids == again.ids == other.ids == back.ids
    assert min(each.stats.cached_tokens for each in (again, other, back)) > 16
    accepted = [[r.accepted for r in each.rounds] for each in (first, again, back)]
    assert accepted[0] == accepted[1] == accepted[2]
    log = first.rounds[:4]
    rest = request(long, 3, TOKENS, attempt=2, replay=log)
    resumed = answer(drafting("block_drafter", served), rest)
    assert (*(t for r in log for t in r.tokens), *resumed.ids) == first.ids


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v32"])
def test_drafts_over_shared_rows_are_those_of_each_alone(family: str) -> None:
    """Also after the other one drafted, whose drafts leave nothing behind."""
    pair = load_quietly(spec_of(family)).head
    both = DraftModel.each_of(None, pair)
    alone_models = {
        "block_drafter": DraftModel.of(None, pair.drafter),
        "native_mtp": DraftModel.of(pair.family, pair.head),
    }
    width, sampler = pair.drafter.width, Sampler(Sampling(), 0)
    rows, tokens = mx.random.normal((1, 24, 2 * width)), mx.array([[7 * i + 3 for i in range(24)]])
    parts = {"block_drafter": rows[..., width:], "native_mtp": rows[..., :width]}

    def drafts(model: DraftModel, state: DraftState) -> tuple[mx.array, DraftState]:
        rows = list[mx.array]()

        def logits(output: mx.array) -> mx.array:
            rows.append(model.logits(output))
            return rows[-1]

        drafter = Drafter(model._replace(logits=logits), [state])
        _ = drafter.draft(5, [5], [sampler], [state.rows])
        return mx.concatenate(rows), drafter.extract(0)

    state, states = DraftState(), {kind: DraftState() for kind in alone_models}
    for begin, kind in ((0, "native_mtp"), (8, "block_drafter"), (16, "native_mtp")):
        state.observe(rows[:, begin : begin + 8], tokens[0, begin : begin + 8])
        drawn, state = drafts(both[kind], state)  # pyright: ignore[reportArgumentType]
        for name, part in parts.items():
            states[name].observe(part[:, begin : begin + 8], tokens[0, begin : begin + 8])
            expected, states[name] = drafts(alone_models[name], states[name])
            assert name != kind or mx.array_equal(drawn, expected)


def asked(served: TextEngine, count: int) -> list[Answer]:
    """The same request again and again, whose K and drafter are chosen."""
    wanted = {"adaptive_draft": True, "initial_draft_tokens": 2}
    return [answer(served, request(PROMPT, 4, TOKENS, **wanted)) for _ in range(count)]


def with_costs(served: TextEngine, **seconds: Sequence[float]) -> TextEngine:
    for kind, each in seconds.items():
        served.drafting.profiles[kind].costs.probe(each)  # pyright: ignore[reportArgumentType]
    return served


FLAT = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]


def test_the_one_whose_drafts_are_accepted_drafts_after_each_was_tried() -> None:
    """The drafter is random, and the head fits the model."""
    served = with_costs(engine("block_drafter"), block_drafter=FLAT, native_mtp=FLAT)
    answers = asked(served, 5)
    assert [each.stats.drafter_kind for each in answers[:3]] == [
        "block_drafter",
        "native_mtp",
        "native_mtp",
    ]
    assert answers[-1].stats.drafter_kind == "native_mtp"
    assert len({each.ids for each in answers}) == 1
    reason = answers[-1].stats.depth_reason
    assert reason.startswith("native MTP drafts; times plain decoding: the block drafter 1.00, ")
    assert "of at most 4" in reason
    assert served.lookup.policy.costs is served.drafting.profiles["native_mtp"].costs
    assert "until its speed is known" in answers[0].stats.depth_reason


def test_a_drafter_that_knows_the_answer_is_chosen_unless_it_costs_too_much() -> None:
    for seconds, kind in (
        (FLAT, "block_drafter"),
        ([1.0, *(9.0 + i for i in range(7))], "native_mtp"),
    ):
        stage_spec = spec_of("qwen3_5")
        it = load_quietly(stage_spec)
        force(it.head, [[*PROMPT, *alone("native_mtp", "qwen3_5", 0).ids]], lambda _: False)
        served = drafting("block_drafter", engine_of(it, stage_spec, clock=lambda: 0.0))
        answers = asked(with_costs(served, block_drafter=seconds, native_mtp=FLAT), 4)
        assert answers[-1].stats.drafter_kind == kind
        assert {each.ids for each in answers} == {alone("native_mtp", "qwen3_5", 0).ids}


def test_costs_of_both_are_measured_and_kept_apart() -> None:
    stage_spec = spec_of("qwen3_5")
    served = engine_of(load_quietly(stage_spec), stage_spec)
    own, calls = served.drafting.models["native_mtp"], list[mx.array]()

    def logits(output: mx.array) -> mx.array:
        calls.append(output)
        return own.logits(output)

    served.drafting.models["native_mtp"] = own._replace(logits=logits)
    served.measurements.measure()
    assert calls
    profiles = served.drafting.profiles
    assert {*profiles} == {*KINDS}
    assert all(len(each.costs.probed) == 8 for each in profiles.values())
    assert profiles["native_mtp"].costs is not profiles["block_drafter"].costs
    assert profiles["native_mtp"].key != profiles["block_drafter"].key


def test_where_drafts_may_decide_near_ties_no_answer_changes_what_drafts() -> None:
    served = with_costs(engine("block_drafter"), block_drafter=FLAT, native_mtp=FLAT)
    served.drafting.is_near_tie = True
    assert {each.stats.drafter_kind for each in asked(served, 3)} == {"block_drafter"}


def test_a_drafter_whose_numbers_are_not_finite_leaves_drafting_to_the_head() -> None:
    it = load_quietly(spec_of("qwen3_5"))
    norm = it.head.drafter.module.norm
    norm.weight = norm.weight * float("nan")
    served = drafting("block_drafter", engine_of(it, spec_of("qwen3_5"), clock=lambda: 0.0))
    answers = asked(with_costs(served, block_drafter=FLAT, native_mtp=FLAT), 3)
    assert [each.stats.drafter_kind for each in answers] == ["block_drafter", *["native_mtp"] * 2]
    assert {each.ids for each in answers} == {alone("native_mtp", "qwen3_5", 0).ids}
    assert answers[0].stats.head_parked
    assert "the logits of the block drafter were not finite" in answers[0].stats.drafting_reason
    assert not answers[1].stats.head_parked and answers[1].stats.accepted_draft_tokens
    reason = answers[2].stats.depth_reason
    assert reason.startswith("native MTP drafts: the logits of the block drafter were not finite")


def test_a_drafter_alone_whose_numbers_are_not_finite_drafts_no_more() -> None:
    stage_spec = spec_of("qwen3_5", head=False)
    it = load_quietly(stage_spec)
    it.head.module.norm.weight = it.head.module.norm.weight * float("nan")
    served = engine_of(it, stage_spec, clock=lambda: 0.0)
    answers = asked(with_costs(served, block_drafter=FLAT), 2)
    assert {each.ids for each in answers} == {alone("native_mtp", "qwen3_5", 0).ids}
    assert "the logits of the block drafter were not finite" in answers[1].stats.drafting_reason
    assert answers[1].stats.spec_decode_rounds == 0
