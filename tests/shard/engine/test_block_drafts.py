"""Answers with a block drafter: those of plain decoding, whatever it drafts."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from drafters import drafter_config, force, make_drafter, second_config
from engines import Answer, answer, engine_of, load_quietly, request, spec
from models import make_checkpoint
from readers import GREEDY, PROMPTS, SEEDED, Reader, both_ways, together
from reading_together import Drive, LocalReaders

from exo_node.mtp.types import Sampling
from exo_node.placement.errors import InvalidRequest
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.reading.link import LayerRange
from exo_node.shard.engine.request import Parameters
from exo_node.shard.model.block_drafter import BlockDrafter
from exo_node.shard.model.load import Loaded
from exo_node.shard.text.image_rows import PreparedImage

_KEPT = tempfile.TemporaryDirectory(prefix="exo-drafts-")
PROMPT = PROMPTS[0]
TOKENS = 40
SAMPLINGS = [GREEDY, SEEDED]


@functools.cache
def folder(family: Any) -> Path:
    made = Path(_KEPT.name) / family
    return make_checkpoint(made, family, dtype="float32", vocab=4096, raw=False)


@functools.cache
def drafter_folder() -> Path:
    return make_drafter(Path(_KEPT.name) / "drafter", drafter_config(4096))


@functools.cache
def second_folder() -> Path:
    return make_drafter(Path(_KEPT.name) / "second", second_config(4096))


def spec_of(family: str, **changes: Any) -> pb.StageSpec:
    drafter = {"drafter_path": str(drafter_folder()), "drafter_bytes": 1 << 20}
    fields: dict[str, Any] = {"native_mtp": True, "max_draft_tokens": 7, "drafter": "a/drafter"}
    fields |= {"num_layers": 4, **drafter, **changes}
    return spec(folder(family), 0, 4, **fields)


def loaded(family: str = "qwen3") -> Loaded:
    """Anew: tests replace parts of the drafter."""
    return load_quietly(spec_of(family))


def engine(
    it: Loaded, family: str = "qwen3", *, ahead: bool | None = None, **changes: Any
) -> TextEngine:
    served = engine_of(it, spec_of(family, **changes), runs_ahead=ahead)
    served.measurements.batch_identity = "bitwise"
    return served


@functools.cache
def plain(family: str, prompt: tuple[int, ...], sampling: Sampling = GREEDY) -> Answer:
    without = spec_of(family, native_mtp=False, drafter="", drafter_path="")
    served = engine_of(load_quietly(without), without)
    return answer(served, request(prompt, 0, TOKENS, sampling=sampling))


def forced(
    prompts: Sequence[Sequence[int]],
    family: str = "qwen3",
    sampling: Sampling = GREEDY,
    wrong: Callable[[int], bool] = lambda _: False,
) -> Loaded:
    it = loaded(family)
    texts = [[*prompt, *plain(family, tuple(prompt), sampling).ids] for prompt in prompts]
    force(it.head, texts, wrong)
    return it


def asked(
    k: int, prompt: Sequence[int] = PROMPT, sampling: Sampling = GREEDY, **changes: Any
) -> Parameters:
    return request(prompt, k, TOKENS, sampling=sampling, **changes)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_5"])
def test_ids_are_those_of_plain_decoding_at_every_k(family: str, sampling: Sampling) -> None:
    served, expected = engine(loaded(family), family), plain(family, tuple(PROMPT), sampling)
    for k in range(8):
        got = answer(served, asked(k, sampling=sampling))
        assert got.ids == expected.ids and got.text == expected.text
        assert got.stats.num_draft_tokens == k
        assert got.stats.drafter_kind == ("block_drafter" if k else "none")
        assert (got.stats.proposed_draft_tokens > 0) == (k > 0)


@pytest.mark.smoke
@both_ways
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_drafts_that_are_right_are_accepted(sampling: Sampling, *, ahead: bool) -> None:
    it = forced([PROMPT], sampling=sampling)
    got = answer(engine(it, ahead=ahead), asked(7, sampling=sampling))
    assert got.ids == plain("qwen3", tuple(PROMPT), sampling).ids
    assert got.stats.acceptance_rate == 1.0
    assert got.stats.spec_decode_rounds <= -(-TOKENS // 8)


@both_ways
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_rejected_drafts_leave_no_trace_in_either_cache(family: str, *, ahead: bool) -> None:
    """A later draft is right only if the drafter's rows are those of the answer."""
    it = forced([PROMPT], family, wrong=lambda position: position % 5 == 0)
    got = answer(engine(it, family, ahead=ahead), asked(7))
    assert got.ids == plain(family, tuple(PROMPT)).ids
    rounds = [r for r in got.rounds[1:-1] if r.drafted == 7]
    assert rounds and all(r.accepted == 4 for r in rounds[1:])


@both_ways
def test_drafts_that_follow_each_other_change_no_answer_alone_or_together(*, ahead: bool) -> None:
    changes = {"drafter_path": str(second_folder())}
    it = load_quietly(spec_of("qwen3", **changes))
    assert it.head.follow is not None
    served = engine(it, ahead=ahead, **changes)
    for sampling in (*SAMPLINGS, Sampling(temperature=1.0)):
        for k in (1, 4, 7):
            got = answer(served, asked(k, sampling=sampling))
            assert got.stats.proposed_draft_tokens > 0
            if sampling in SAMPLINGS:
                assert got.ids == plain("qwen3", tuple(PROMPT), sampling).ids
    biased = Sampling(logit_bias=tuple((token, -100.0) for token in range(2048)))
    assert (
        answer(served, asked(4, sampling=biased)).ids == plain("qwen3", tuple(PROMPT), biased).ids
    ), "most of what a selector ranks is barred"
    prompts = [PROMPTS[i] for i in range(3)]
    readers = [Reader(asked(3, prompt), begins=2 * i) for i, prompt in enumerate(prompts)]
    together(served, readers)
    for reader, prompt in zip(readers, prompts, strict=True):
        assert tuple(reader.ids) == plain("qwen3", tuple(prompt)).ids


@both_ways
def test_a_block_follows_the_last_token(monkeypatch: pytest.MonkeyPatch, *, ahead: bool) -> None:
    before, select = list[int](), BlockDrafter._select  # pyright: ignore[reportPrivateUsage]

    def noting(it: BlockDrafter, output: mx.array, logits: mx.array, ids: mx.array) -> mx.array:
        before.extend(ids.tolist())  # pyright: ignore[reportArgumentType]
        return select(it, output, logits, ids)

    changes = {"drafter_path": str(second_folder())}
    it = load_quietly(spec_of("qwen3", **changes))
    monkeypatch.setattr(BlockDrafter, "_select", noting)  # a load selects, too
    served = engine(it, ahead=ahead, **changes)
    rounds = answer(served, asked(1)).rounds
    last = [each.tokens[-1] for each in rounds if each.tokens]
    count = min(len(before), len(last)) - 1
    assert count > TOKENS // 3 and before[:count] == last[:count]


def test_adaptive_k_ends_where_drafts_are_never_accepted() -> None:
    served = engine(loaded())
    served.measurements.measure()
    assert served.measurements.identity == "bitwise"
    got = answer(served, request(PROMPT, 7, 200, adaptive_draft=True, initial_draft_tokens=3))
    assert got.stats.draft_k_trace[-1][0] < 3
    assert got.stats.draft_policy == "adaptive" and got.stats.depth_reason


def test_costs_of_a_block_are_measured_as_a_heads_are() -> None:
    served = engine(loaded())
    costs = served.measurements.costs(PROMPT, 3, 1)
    assert len(costs.draft) == 3 and all(costs.draft)


@both_ways
def test_requests_share_rounds_with_the_ids_that_they_have_alone(*, ahead: bool) -> None:
    prompts = [PROMPTS[i] for i in range(3)]
    it = forced(prompts, wrong=lambda position: position % 4 == 0)
    served = engine(it, ahead=ahead)
    readers = [Reader(asked(3, prompt), begins=2 * i) for i, prompt in enumerate(prompts)]
    readers += [Reader(asked(0, PROMPTS[3]), begins=1), Reader(asked(3, prompts[0]), 3, ends=9)]
    together(served, readers)
    for reader, prompt in zip(readers, [*prompts, PROMPTS[3]], strict=False):
        assert tuple(reader.ids) == plain("qwen3", tuple(prompt)).ids
    stats = [reader.end.stats for reader in readers[:3] if reader.end is not None]
    assert all(each.batched_tokens and each.accepted_draft_tokens > TOKENS // 3 for each in stats)
    assert served.live_requests == 0


def test_a_cached_prefix_brings_the_drafters_rows() -> None:
    long = [*PROMPTS[1], *PROMPTS[2]] * 2
    it = forced([long])
    served = engine(it, prefix_cache_bytes=64 << 20, prefill_chunk=16)
    first, again = (answer(served, asked(7, long)) for _ in range(2))
    assert again.stats.cached_tokens > 16
    assert first.ids == again.ids == plain("qwen3", tuple(long)).ids
    assert first.stats.acceptance_rate == again.stats.acceptance_rate == 1.0


def test_readers_of_a_long_prompt_read_for_answers_that_do_not_draft() -> None:
    """They return no outputs of inner layers."""
    long = [*PROMPTS[1], *PROMPTS[2]] * 2
    reader, limits = engine(loaded(), prefill_chunk=16), loaded().expected
    for k, is_shared in ((3, False), (0, True)):
        readers = LocalReaders([reader], [LayerRange(2, 4)], limits)
        got = Drive(engine(loaded(), prefill_chunk=16), asked(k, long), readers).finish()
        assert got.ids == plain("qwen3", tuple(long)).ids
        assert (readers.outcome.bytes > 0) == is_shared
        assert ("a block drafter needs" in readers.outcome.reason) != is_shared


def test_an_answer_resumes_from_its_log() -> None:
    it = forced([PROMPT])
    served = engine(it)
    whole = answer(served, asked(3))
    log = whole.rounds[:4]
    rest = answer(served, dataclasses.replace(asked(3), attempt=2, replay=log))
    assert (*(t for r in log for t in r.tokens), *rest.ids) == whole.ids
    assert rest.stats.accepted_draft_tokens > 0


def test_a_cancelled_answer_leaves_nothing() -> None:
    served = engine(loaded())
    events = served.generate(asked(3))
    for _ in range(4):
        _ = next(events)
    events.close()
    assert served.live_requests == 0 and served.cache_bytes() == 0
    assert answer(served, asked(3)).ids == plain("qwen3", tuple(PROMPT)).ids


def test_a_drafter_whose_logits_are_not_finite_is_parked() -> None:
    it = loaded()
    head: Any = it.head
    block = head.block

    def broken(first: mx.array, k: int, cache: Any) -> mx.array:
        return block(first, k, cache) * mx.nan

    head.block = broken
    served = engine(it)
    got = answer(served, asked(3))
    assert got.ids == plain("qwen3", tuple(PROMPT)).ids
    assert got.stats.head_parked and "not finite" in got.stats.drafting_reason


@pytest.mark.smoke
def test_an_answer_about_images_does_not_draft_and_says_why() -> None:
    served = engine(loaded())
    pictured = dataclasses.replace(asked(3), images=[PreparedImage.__new__(PreparedImage)])
    granted = served.drafting.grant(pictured)
    assert granted.k == 0 and "images" in granted.drafting.drafting_reason
    assert served.drafting.grant(asked(3)).k == 3


def test_a_request_cannot_draft_more_than_the_card_allows() -> None:
    served = engine(loaded(), max_draft_tokens=4)
    with pytest.raises(InvalidRequest, match="0 to 4"):
        _ = answer(served, asked(5))
