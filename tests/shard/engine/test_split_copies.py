"""Copied drafts over stages: the ids and log-probabilities of plain decoding, whatever happens."""

# pyright: reportPrivateUsage=false

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from budget import seeds
from clocks import Clock
from engines import Answer, answer, changed, request
from forced_copies import FixedLength
from models import Family, make_checkpoint
from pipelines import THREE, TWO, Pipeline, pipeline_of, small_pipeline
from readers import Reader, prompt
from shims import at_rows, by_rows, perturb
from small import small_checkpoint
from staged_readers import Scene

from exo_node.mtp.drafting.lookup_drafts import PromptLookup
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.types import Round, Sampling, TokenLogprobs
from exo_node.placement.errors import InvalidFrame, PeerLost
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.events import Delta
from exo_node.shard.engine.measuring import NOT_MEASURED
from exo_node.shard.engine.request import DraftProgress, Parameters, Request
from exo_node.shard.engine.split_copies import OLDER, SplitCopies
from exo_node.shard.engine.stage_copies import LENGTHS
from exo_node.shard.pipeline.copy_query import ExactCopies
from exo_node.shard.pipeline.link import Trip

TOKENS = 40
FEW = tuple((token, 100.0) for token in (40, 41, 42))
LOOPS = Sampling(logit_bias=FEW)
SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=1.0, seed=5, logit_bias=FEW),
    "seeded and cut": Sampling(temperature=0.9, top_p=0.9, top_k=2, seed=8, logit_bias=FEW),
    "penalised": Sampling(repetition_penalty=1.1, repetition_context_size=30, logit_bias=FEW),
}
"""Those that draw from three ids copy, since the last ones occurred before, and others often
followed; of the first, `edited` prompts."""
WINDOWS = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
}


@functools.cache
def folder_of(kind: str) -> Path:
    """A model of four layers whose caches are of one kind, or of two."""
    if kind in ("gated delta", "quantised"):
        return small_checkpoint(hidden=128 if kind == "quantised" else 64, context=0.8)
    made: dict[str, tuple[Family, dict[str, Any]]] = {
        "plain": ("glm4_moe", {"first_k_dense_replace": 99}),
        "latent": ("deepseek_v3", {"first_k_dense_replace": 99}),
        "windows": ("llama", WINDOWS),
    }
    family, changes = made[kind]
    fields: dict[str, Any] = {"dtype": "float32", "layers": 4, "vocab": 4096, "raw": False}
    folder = small_checkpoint().parent / f"split-{kind}"
    return make_checkpoint(folder, family, seed=7, changes=changes, mtp=False, **fields)


@functools.cache
def staged(kind: str, bounds: tuple[int, ...]) -> Pipeline:
    """Stages that may copy, and plain ones of the same weights."""
    bits: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32} if kind == "quantised" else {}
    return pipeline_of(bounds, folder_of(kind), prefill_chunk=64, **bits)


def fresh(kind: str, bounds: tuple[int, ...], length: int = 7, room: int = 0) -> Pipeline:
    made = staged(kind, bounds)
    rooms = (room,) * len(made.parts)
    options = replace(made._options, prefix_cache_bytes=room)
    return Pipeline(made.parts, options, rooms=rooms).copy(length)


def asks(
    tokens: int = TOKENS, *, ids: Sequence[int] = (), lookup: bool = True, **changes: Any
) -> Parameters:
    fields = {"sampling": LOOPS, "top_logprobs": 2, "ignore_eos": True} | changes
    start = [40, 41, 42, 40, 41, 41, 42, 42, 40, 40]
    ids = ids or [*prompt(5, 60), *start, *prompt(6, 9), *start[:4]]
    return request(ids, 0, tokens, prompt_lookup=lookup, **fields)


def edited(pipeline: Pipeline, **changes: Any) -> Parameters:
    """A greedy request whose prompt holds an answer to its beginning, with three ids changed."""
    start = prompt(2)
    greedy: dict[str, Any] = {"sampling": Sampling()} | changes
    body = list(answer(pipeline.engine, asks(48, lookup=False, ids=start, **greedy)).ids)
    for at in (10, 22, 30):
        body[at] = 77 + at
    return asks(60, ids=[*start, *body, *start], **greedy)


def scores_of(given: Answer | Reader) -> list[TokenLogprobs]:
    return [entry for round_ in given.rounds for entry in round_.logprobs]


def ids_of(given: Answer | Reader) -> list[int]:
    return [token for round_ in given.rounds for token in round_.tokens]


def plain_of(pipeline: Pipeline, engine_request: Parameters) -> Answer:
    """What it is answered without copies."""
    drafting = type(engine_request.drafting)()
    drafting.CopyFrom(engine_request.drafting)
    drafting.prompt_lookup = False
    name = f"{engine_request.name}-plain"
    return answer(pipeline.engine, replace(engine_request, name=name, drafting=drafting))


def assert_same(copied: Answer | Reader, plain: Answer | Reader) -> None:
    assert ids_of(copied) == ids_of(plain)
    assert scores_of(copied) == scores_of(plain)


def wide(pipeline: Pipeline) -> list[int]:
    """The rows of each round that copied."""
    return [block.rows for block in pipeline.link.sent if block.is_round and block.rows > 1]


KINDS = ["gated delta", "plain", "latent", "windows", "quantised"]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("bounds", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_change_no_id_and_no_log_probability(
    kind: str, bounds: tuple[int, ...], sampling: str
) -> None:
    pipeline = fresh(kind, bounds)
    if sampling == "greedy":
        engine_request = edited(pipeline)
    else:
        engine_request = asks(sampling=SAMPLINGS[sampling])
    plain, copied = plain_of(pipeline, engine_request), answer(pipeline.engine, engine_request)
    assert_same(copied, plain)
    stats = copied.stats
    assert 0 < stats.lookup_accepted_tokens < stats.lookup_proposed_tokens
    assert (stats.drafter_kind, stats.num_draft_tokens) == ("prompt_lookup", 0)
    assert (stats.lookup_reason, stats.draft_policy) == ("", "adaptive")
    assert (copied.end.identity, plain.end.identity) == ("bitwise", "off")
    assert set(wide(pipeline)) == {8}
    assert not pipeline.leftovers


@pytest.mark.parametrize("length", [3, 15])
def test_other_lengths_are_as_exact(length: int) -> None:
    pipeline = fresh("gated delta", TWO, length)
    engine_request = asks(3 * TOKENS)
    assert_same(answer(pipeline.engine, engine_request), plain_of(pipeline, engine_request))
    assert set(wide(pipeline)) == {length + 1}


@pytest.mark.parametrize("tokens", range(10, 20))
def test_an_answer_that_ends_within_a_copy_has_no_token_more(tokens: int) -> None:
    pipeline = fresh("windows", TWO)
    engine_request = asks(tokens)
    plain, copied = plain_of(pipeline, engine_request), answer(pipeline.engine, engine_request)
    assert_same(copied, plain)
    assert len(copied.ids) == tokens and wide(pipeline)
    assert copied.end.reason == "length"


def test_an_answer_stops_where_it_stops_without_copies() -> None:
    """At texts that end with a token of a copy that is not its last one."""
    pipeline = fresh("gated delta", THREE)
    engine_request = edited(pipeline)
    whole, inner = answer(pipeline.engine, engine_request), 0
    for end in range(20, len(whole.text), 7):
        stopping = changed(engine_request, name=f"s{end}", stop=[whole.text[end : end + 4]])
        plain, copied = plain_of(pipeline, stopping), answer(pipeline.engine, stopping)
        assert_same(copied, plain)
        assert (copied.text, copied.end.reason) == (plain.text, plain.end.reason)
        last = copied.rounds[-1]
        inner += last.is_copied and len(last.tokens) <= last.accepted
    assert inner > 0
    assert not pipeline.leftovers


@pytest.mark.parametrize("is_computed", [False, True], ids=["before", "after"])
def test_of_an_answer_that_is_cancelled_within_a_round_that_copies_nothing_stays(
    is_computed: bool,
) -> None:
    scene = scene_of("gated delta", THREE)
    reader = scene.ask(asks())
    message = scene.until(lambda _: bool(wide(scene.pipeline)))
    if is_computed:
        scene.link.compute(message)
    scene.cancel(reader)
    scene.link.flush()
    assert set(scene.pipeline.leftovers) <= {"in flight"}
    again = scene.ask(asks())
    scene.finish()
    assert_same(again, plain_of(fresh("gated delta", THREE), again.request))
    assert set(scene.pipeline.leftovers) <= {"in flight"}


def test_an_answer_after_a_cached_prefix_copies_as_well() -> None:
    pipeline = fresh("gated delta", THREE, room=64 << 20)
    ids = [*prompt(5, 200), 40, 41, 42, 40, 41, 41, 42, *prompt(6, 9), 40, 41, 42]
    first, second = (answer(pipeline.engine, asks(ids=ids)) for _ in range(2))
    assert second.stats.cached_tokens > 0 and second.stats.lookup_accepted_tokens > 0
    assert_same(second, first)
    assert_same(second, plain_of(fresh("gated delta", THREE), asks(ids=ids)))


# ------------------------------------------------------------------- beside other answers


def scene_of(kind: str, bounds: tuple[int, ...]) -> Scene:
    """Answers whose trips are held back."""
    return Scene(pipeline=fresh(kind, bounds))


@pytest.mark.parametrize("others", [1, 3])
@pytest.mark.parametrize("kind", ["gated delta", "windows"])
def test_an_answer_that_others_join_goes_on_plainly_and_copies_again_when_they_are_done(
    kind: str, others: int
) -> None:
    scene = scene_of(kind, TWO)
    pipeline, long = scene.pipeline, asks(4 * TOKENS)
    reader = scene.ask(long)
    _ = scene.until(lambda _: len(wide(pipeline)) > 1)
    before = len(pipeline.link.sent)
    joined = [scene.ask(asks(12, ids=prompt(20 + i, 30))) for i in range(others)]
    scene.finish()
    alone = fresh(kind, TWO)
    for each in (reader, *joined):
        assert each.fault is None
        assert_same(each, plain_of(alone, each.request))
    rounds = [block for block in pipeline.link.sent[before:] if block.is_round]
    first, *_, last = (
        number
        for number, block in enumerate(rounds)
        if {member.request for member in block.members} & {each.request.name for each in joined}
    )
    assert all(block.rows == 1 for block in rounds[first : last + 1])
    assert any(block.rows > 1 for block in rounds[last:]), "it does not copy again"
    assert max(map(len, (block.members for block in rounds))) == (2 if others > 1 else 1)
    assert not pipeline.leftovers


@pytest.mark.parametrize("seed", seeds(6, 300))
def test_answers_that_come_stall_and_leave_at_random_are_those_of_plain_decoding(
    seed: int,
) -> None:
    draw = random.Random(seed)
    scene = scene_of(draw.choice(["gated delta", "windows", "latent"]), draw.choice([TWO, THREE]))
    readers, ended = list[Reader](), list[Reader]()
    for _ in range(400):
        if (
            len(scene.live) < 3
            and draw.random() < (0.05 if scene.live else 0.5)
            and len(readers) < 8
        ):
            sampling = SAMPLINGS[draw.choice(list(SAMPLINGS))]
            readers.append(scene.ask(asks(draw.randrange(1, 60), sampling=sampling)))
        if scene.live and draw.random() < 0.01:
            victim = draw.choice(scene.live)
            scene.cancel(victim)
            ended.append(victim)
        scene.settle()
        able = scene.link.able()
        if able:
            message = draw.choice(able)
            if not message.is_computed and draw.random() < 0.3:
                scene.link.compute(message)
            else:
                scene.bring(message)
    scene.finish()
    readers.append(scene.ask(asks()))
    scene.finish()
    assert wide(scene.pipeline)
    alone = fresh("gated delta", TWO)
    alone = Pipeline(scene.pipeline.parts, alone._options)
    for each in readers:
        assert each.fault is None
        plain = plain_of(alone, each.request)
        count = len(ids_of(each)) if each in ended else len(plain.ids)
        assert ids_of(each) == list(plain.ids[:count])
        assert scores_of(each) == scores_of(plain)[:count]
    assert set(scene.pipeline.leftovers) <= {"in flight"}


# ----------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_whose_stage_is_lost_within_copies_resumes_by_its_log(
    kind: str, lost: int
) -> None:
    pipeline = fresh(kind, THREE)
    engine_request = edited(pipeline)
    plain = plain_of(pipeline, engine_request)
    pipeline.link.sent.clear()
    _ = answer(pipeline.engine, engine_request)
    blocks = [n for n, block in enumerate(pipeline.link.sent) if block.is_round and block.rows > 1]
    assert len(blocks) > 3
    for after in (blocks[0], blocks[0] + 1, blocks[2], blocks[2] + 1):
        first = replace(engine_request, name=f"lost-{after}")
        pipeline.lose(lost, after)
        log = list[Round]()
        with pytest.raises(PeerLost):
            for event in pipeline.engine.generate(first):
                log += [event.round] if isinstance(event, Delta) else []
        pipeline.replace(lost)
        _ = pipeline.copy(7)
        rest = answer(pipeline.engine, replace(first, attempt=2, replay=tuple(log)))
        ids = [*(token for round_ in log for token in round_.tokens), *rest.ids]
        scores = [entry for round_ in (*log, *rest.rounds) for entry in round_.logprobs]
        assert ids == list(plain.ids) and scores == scores_of(plain)
        assert any(round_.is_copied for round_ in rest.rounds)
        assert not pipeline.leftovers


def test_numbers_that_are_not_finite_in_a_drafts_row_repeat_the_round_plainly() -> None:
    """Only forwards of eight rows give NaN here: a draft's doing, so far as anybody can tell."""
    pipeline = small_pipeline(TWO).copy(7)
    engine_request = asks()
    plain = plain_of(pipeline, engine_request)
    worker = pipeline.workers[0]
    computed = worker._rounds.block

    def block(*args: Any) -> bytes:
        data = computed(*args)
        return data[:-64] + b"\xff" * 64

    worker._rounds.block = block  # type: ignore[method-assign]
    copied = answer(pipeline.engine, engine_request)
    assert_same(copied, plain)
    assert wide(pipeline)


# -------------------------------------------------------------------------- the agreement


def measured(pipeline: Pipeline) -> Pipeline:
    """Stages that measured themselves."""
    for worker in pipeline.workers:
        worker.begin_measuring().finish()
    pipeline.engine.measurements.measure()
    return pipeline


def test_stages_agree_on_the_lengths_that_all_of_them_measured() -> None:
    pipeline = measured(small_pipeline(THREE, prompt_lookup=True, context_length=512))
    assert tuple(pipeline.engine.lookup.exact.lengths) == LENGTHS
    assert [tuple(worker.copies.exact.lengths) for worker in pipeline.workers] == [LENGTHS] * 2
    first, last = pipeline.workers
    first.copies.exact = ExactCopies([3, 7], [1, 1, 1], [0, 0])
    last.copies.exact = ExactCopies([7, 15], [1, 1, 1], [0, 0])
    stats = answer(pipeline.engine, asks()).stats
    assert stats.lookup_reason == ""
    assert set(wide(pipeline)) <= {8}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_whose_blocks_have_other_bits_keeps_all_from_copying(stage: int) -> None:
    pipeline = small_pipeline(THREE, prompt_lookup=True, context_length=512)
    parts = list(pipeline.parts)
    changed = pipeline_of(THREE, small_checkpoint(), prompt_lookup=True, context_length=512)
    parts[stage] = changed.parts[stage]
    assert perturb(parts[stage].model.model, by_rows) > 0
    pipeline = measured(Pipeline(parts, pipeline._options))
    result = answer(pipeline.engine, asks())
    assert not wide(pipeline) and result.stats.lookup_rounds == 0
    assert result.stats.lookup_reason.startswith(f"stage {stage}: a verify of 4 rows or more")
    assert result.stats.drafter_kind == "none" and result.end.identity == "off"


def test_a_width_that_a_stage_computes_otherwise_is_left_out() -> None:
    parts = list(small_pipeline(TWO).parts)
    parts[1] = pipeline_of(TWO, small_checkpoint()).parts[1]
    assert perturb(parts[1].model.model, at_rows([16])) > 0
    options = replace(small_pipeline(TWO)._options, prompt_lookup=True, context_length=512)
    pipeline = measured(Pipeline(parts, options))
    assert pipeline.workers[0].copies.exact.lengths == [3, 7]


def test_a_stage_that_has_not_measured_yet_says_so_and_later_answers_copy() -> None:
    pipeline = small_pipeline(TWO).copy(7)
    worker, exact = pipeline.workers[0], pipeline.workers[0].copies.exact
    worker.copies.refuse(NOT_MEASURED)
    first = answer(pipeline.engine, asks())
    assert first.stats.lookup_reason == f"stage 1: {NOT_MEASURED}"
    worker.copies.exact = exact
    second = answer(pipeline.engine, asks())
    assert second.stats.lookup_accepted_tokens > 0 and second.stats.lookup_reason == ""
    assert_same(second, first)


@pytest.mark.smoke
def test_a_stage_of_an_older_version_takes_plain_rounds_and_the_reason_is_told() -> None:
    pipeline = small_pipeline(THREE).copy(7)
    pipeline.link.older.add(2)
    engine_request = asks()
    copied = answer(pipeline.engine, engine_request)
    assert (copied.stats.lookup_rounds, copied.stats.lookup_reason) == (0, OLDER)
    assert_same(copied, plain_of(pipeline, engine_request))
    assert all(m.kept_rows is None for block in pipeline.link.sent for m in block.members)


def test_an_answer_that_never_finds_a_copy_asks_nobody() -> None:
    pipeline = small_pipeline(TWO).copy(7)
    asked = list[str | None]()

    def observe(frame: pb.Frame) -> None:
        asked.append(frame.WhichOneof("kind"))

    pipeline.link._observe = observe
    _ = answer(pipeline.engine, asks(4, ids=list(range(100, 140)), sampling=Sampling()))
    assert "copies" not in asked
    for _ in range(2):
        _ = answer(pipeline.engine, asks())
    assert asked.count("copies") == 2, "once an answer"


@pytest.mark.smoke
def test_a_stage_that_is_lost_while_it_is_asked_is_lost() -> None:
    pipeline = small_pipeline(TWO).copy(7)

    def gone(*_: object) -> ExactCopies:
        raise PeerLost("stage 1 has no state of the request any more")

    pipeline.workers[0].agree_on_copies = gone  # type: ignore[method-assign]
    with pytest.raises(PeerLost):
        _ = answer(pipeline.engine, asks())
    assert not pipeline.leftovers


@pytest.mark.smoke
def test_lengths_that_nobody_asked_for_end_the_answer_by_the_fields_name() -> None:
    pipeline = small_pipeline(TWO).copy(7)
    pipeline.workers[0].agree_on_copies = lambda _key, _asked: ExactCopies([15], [1, 1], [0])  # type: ignore[method-assign]
    with pytest.raises(InvalidFrame) as caught:
        _ = answer(pipeline.engine, asks())
    assert caught.value.param == "copies.lengths"
    assert not pipeline.leftovers


@pytest.mark.parametrize("rows", [1, 7, 9])
def test_other_rows_than_a_round_has_end_the_answer_by_the_fields_name(rows: int) -> None:
    pipeline = small_pipeline(TWO).copy(7)
    forward = pipeline.workers[0].forward

    def other_rows(block: Any) -> Any:
        output = forward(block)
        if not (block.is_round and block.rows == 8 and output.block is not None):
            return output
        row = len(output.block.data) // 8
        data = (output.block.data * 2)[: rows * row]
        tokens = (output.block.tokens * 2)[:rows]
        return output._replace(block=replace(output.block, rows=rows, data=data, tokens=tokens))

    pipeline.workers[0].forward = other_rows  # type: ignore[method-assign]
    with pytest.raises(InvalidFrame) as caught:
        _ = answer(pipeline.engine, asks())
    assert caught.value.param == "hidden.rows"


def test_off_on_one_node_is_off_with_its_reason() -> None:
    pipeline = small_pipeline(TWO).copy(7)
    off = "prompt lookup is off by EXO_PROMPT_LOOKUP_ENABLED=0"
    part = pipeline.parts[1]
    worker = type(pipeline.workers[0])(part.model, part.expected, Clock(), lookup_off_reason=off)
    worker.begin_measuring().finish()
    pipeline.link._workers = [worker]
    assert answer(pipeline.engine, asks()).stats.lookup_reason == f"stage 1: {off}"


# --------------------------------------------------------------------------- what it costs


@pytest.mark.smoke
def test_the_first_estimate_has_the_seconds_of_all_stages_and_of_the_links() -> None:
    """Two stages of 1 s a row, 2 s and 4 s a copy, and 3 s on the links: 7 / 5 and 11 / 5."""
    stage = ExactCopies([3, 15], [1, 2, 4], [0.5, 1])
    copies, asked = SplitCopies(lambda: stage), asking()
    trip = Trip((asked.key,), copies=stage.with_stage(stage))
    assert copies.agree(asked, trip, 3.0) is None
    policy = copies._policies[asked]
    assert policy.lengths == [3, 15]
    assert policy.costs.copy_ratios == {(1, 3): 7 / 5, (1, 15): 11 / 5}
    assert policy._removal == {3: 1 / 5, 15: 2 / 5}


@pytest.mark.smoke
@pytest.mark.parametrize(("slower", "copies_them"), [(1.2, True), (30.0, False)])
def test_rounds_that_copy_are_chosen_by_what_they_took(slower: float, copies_them: bool) -> None:
    """Whatever was estimated: links may be slow with many rows."""
    stage = ExactCopies([15], [1, 1], [0])
    copies, asked = SplitCopies(lambda: stage), asking()
    assert copies.plan([asked], is_alone=True).width == 0, "before the stages agreed"
    assert copies.agree(asked, Trip((asked.key,), copies=stage), 0.0) is None
    for _ in range(3):
        copies.timed(asked, 100, 0, 1.0)
        copies.learn()
    assert copies.plan([asked], is_alone=True).width == 15
    assert copies.plan([asked], is_alone=False).width == 0
    for _ in range(3):
        copies.timed(asked, 100, 15, slower)
        copies.learn()
    assert (copies.plan([asked], is_alone=True).width == 15) == copies_them
    copies.release(asked)
    assert copies.plan([asked], is_alone=True).width == 0


def asking() -> Request:
    """A request whose next tokens are in its prompt, surely."""
    lookup = PromptLookup([1, 2, 3, *range(10, 40), 1, 2, 3], FixedLength(15))
    assert lookup.read()
    sampler = Sampler(Sampling(), 1, (), [])
    stop: Any = None
    return Request(asks(), (), sampler, stop, DraftProgress(lookup=lookup))


@pytest.mark.smoke
def test_lengths_that_stages_share_keep_their_seconds() -> None:
    first = ExactCopies([3, 7, 15], [1, 2, 3, 4], [0.1, 0.2, 0.3])
    second = ExactCopies([7, 15, 31], [10, 20, 30, 40], [1, 2, 3])
    both = first.with_stage(second)
    assert both == ExactCopies([7, 15], [11, 23, 34], [1.2, 2.3])
    assert both.with_stage(ExactCopies.none("stage 2: no")) == ExactCopies.none("stage 2: no")
    assert ExactCopies.none("x").with_stage(first) == ExactCopies.none("x"), "who was first"
    apart = first.with_stage(ExactCopies([31], [1, 2], [0]))
    assert not apart.lengths and apart.reason == "no length of copies is exact on all stages"
    assert ExactCopies.measured((3, 7), (7,), (1, 2, 3), (4, 5)) == ExactCopies([7], [1, 3], [5])


@pytest.mark.smoke
def test_what_follows_the_layers_is_measured_on_the_first_stage() -> None:
    """Here only `lm_head` has other bits in blocks: no stage's layers would show it."""
    parts = list(small_pipeline(TWO).parts)
    parts[0] = pipeline_of(TWO, small_checkpoint()).parts[0]
    assert perturb(parts[0].model.model, by_rows, only="lm_head") == 1
    options = replace(small_pipeline(TWO)._options, prompt_lookup=True, context_length=512)
    engine = measured(Pipeline(parts, options)).engine
    assert "does not compute what single steps do" in engine.lookup.refusal


def test_a_chunk_that_is_shorter_than_a_round_limits_the_lengths() -> None:
    """No stage takes a block of more rows than a chunk has."""
    pipeline = measured(small_pipeline(TWO, chunk=8, prompt_lookup=True, context_length=512))
    assert pipeline.engine.lookup.exact.lengths == [3, 7]
    assert pipeline.workers[0].copies.exact.lengths == [3, 7]
