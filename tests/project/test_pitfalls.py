"""The 26 known ways in which native multi-token prediction goes wrong, and the test of each.

The list was compiled from the pull requests and issues of the projects that are named; the
numbering is ours. A pitfall is tested here, or its line in `ELSEWHERE` names the test.
"""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import functools
import re
import sys
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from engines import ORACLE, Answer, answer, load_quietly, request, spec, whole_engine
from families import head_tensors
from long_runs import watched_heads
from mlx import nn
from models import make_checkpoint
from small import PROMPT as SMALL_PROMPT
from small import small_engine
from tables import PROMPT, EndAt, TableDrafter, random_table, tell
from tiny import VOCABULARY, taped_qwen

from exo_node.mtp.answer import CLEAR_EVERY
from exo_node.mtp.drafters import NativeDrafter
from exo_node.mtp.family import draft_logits, family_of
from exo_node.mtp.rollback import rollback, with_tapes
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.sampling import greedy_token
from exo_node.mtp.seams import Drafts, as_ids, as_row
from exo_node.mtp.types import Penalties, Sampling
from exo_node.mtp.weights import HeadSource, HeadUnusable, load_head
from exo_node.shard.checkpoint.checkpoint import read_checkpoint
from exo_node.shard.checkpoint.head_tensors import HeadMissing, find_head
from exo_node.shard.engine.engine import TextEngine
from exo_node.shard.engine.events import Delta
from exo_node.shard.engine.local import LocalVerifier

ELSEWHERE = {
    # exo#2110: zeros where a draft was accepted.
    "04 log-probabilities are zeros": (
        "test_engine_modes.py::test_log_probabilities_are_the_targets_at_every_k"
    ),
    # exo#2110: a final event repeated the last token.
    "06 one token too many is counted": "test_engine.py::test_float32_reproduces_the_oracle",
    # exo#2110.
    "07 the head's weights are loaded although opted out": (
        "test_engine.py::test_without_native_mtp_the_heads_weights_are_not_read"
    ),
    # mlx-lm#990.
    "10 log-probabilities of accepted drafts are the head's": (
        "test_engine_modes.py::test_log_probabilities_are_the_targets_at_every_k"
    ),
}
V = 8
TARGET = random_table(V, seed=1)
HALF = np.where(np.arange(64)[:, None, None] % 3 == 0, -TARGET, TARGET)
OTHER_PROMPT: list[int] = ORACLE[0]["prompt_ids"]


@pytest.fixture(scope="module")
def engine() -> TextEngine:
    return small_engine()


@pytest.fixture(scope="module")
def demo() -> TextEngine:
    """Where only acceptance shows it, which takes trained weights."""
    return whole_engine()


@functools.cache
def undisturbed(engine: TextEngine) -> Answer:
    return answer(engine, request(SMALL_PROMPT, 2, 60))


@pytest.fixture(scope="module")
def family() -> Any:
    found = family_of(taped_qwen())
    assert found is not None
    return found


def made_head(family: Any) -> Any:
    mx.random.seed(1)
    head = family.make_head()
    mx.eval(head.parameters())
    return head


def loaded(file: Path) -> dict[str, mx.array]:
    """Copies, so that the file may be written anew."""
    weights = {k: mx.array(v) for k, v in cast("dict[str, mx.array]", mx.load(str(file))).items()}
    mx.eval(weights)
    return weights


def accepted(engine: TextEngine, k: int, answers: int = 4) -> int:
    """Drafts that stood, over the oracle's longest answers, which are given all the same."""
    total = 0
    for row in sorted(ORACLE, key=lambda row: len(row["greedy_ids"]))[-answers:]:
        got = answer(engine, request(row["prompt_ids"], k, 24))
        assert list(got.ids) == row["greedy_ids"][:24], "an answer never shows it"
        total += got.stats.accepted_draft_tokens
    return total


class Counting(NativeDrafter):
    """Notes the committed rows that the head's cache holds when a round's first draft is made."""

    def __init__(self, family: Any, k: int) -> None:
        head = made_head(family)
        logits = draft_logits(family, head)
        super().__init__(head, family.embed, logits, Sampler(Sampling(), 0), k, overlap=True)
        self.held: list[tuple[int, int]] = []

    def draft(self, k: int, position: int) -> Drafts:
        drafts = super().draft(k, position)
        self.held.append((self.cache.offset - (k - 1), position - 1))
        return drafts


def test_pitfall_01_hole_in_the_heads_cache_after_a_full_accept(family: Any) -> None:
    """exo#2110, mlx-lm#990: nobody wrote the row of the last draft when all were accepted."""
    drafter = Counting(family, 2)
    hidden = mx.ones((1, 3, 64))
    drafter.observe(hidden, as_row([1, 2, 3]))
    for position in (4, 7, 10):  # each round commits both drafts and the bonus token
        _ = drafter.draft(2, position)
        drafter.observe(hidden, as_row([1, 2, 3]))
    assert [held for held, _ in drafter.held] == [wanted for _, wanted in drafter.held]
    told = tell(TARGET, TARGET, 2)  # what the loop tells a drafter, where every draft stands
    assert isinstance(told.drafter, TableDrafter)
    assert [at for at, _, _ in told.drafter.seen] == list(range(len(PROMPT) + len(told.ids) - 1))


@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_pitfall_02_the_prompt_is_prefilled_once_and_not_token_by_token(chunk: int) -> None:
    """exo#2110: twice on dense models, token by token on mixtures of experts."""
    told = tell(TARGET, HALF, 2, prompt=(1, 0, 2, 3, 1, 0, 2), prefill_chunk=chunk)
    prefills = [call for call in told.verifier.calls if "all" not in call and "roll" not in call]
    assert len(prefills) == -(-7 // chunk)
    assert isinstance(told.drafter, TableDrafter)
    assert [at for at, _, _ in told.drafter.seen[:7]] == list(range(7))


def test_pitfall_03_penalties_are_silently_dropped() -> None:
    """exo#2110, though its own cards set one. `test_engine.py` compares with mlx-lm's.

    Here a penalty is so strong that a row depends on the drafts before it in its own block.
    """
    strong = Sampling(penalties=Penalties(repetition=9.0, context_size=4))
    expected = tell(TARGET, sampling=strong).ids
    assert expected != tell(TARGET).ids
    assert tell(TARGET, TARGET, 3, sampling=strong).ids == expected


def test_pitfall_05_counts_are_zero_when_a_stop_string_ends_the_answer(engine: TextEngine) -> None:
    """exo#2110."""
    stop = undisturbed(engine).text[60:66]
    got = answer(engine, request(SMALL_PROMPT, 2, 60, stop=(stop,)))
    stats = got.stats
    assert got.done.reason == "stop"
    assert stats.completion_tokens > 0
    assert 0 < stats.accepted_draft_tokens <= stats.proposed_draft_tokens


def test_pitfall_08_errors_of_cache_repair_are_swallowed(engine: TextEngine) -> None:
    """exo#2110 logged them and went on with the stale cache; here they end the answer."""
    steps = engine.generate(request(SMALL_PROMPT, 2, 60, ignore_end=True))
    with pytest.MonkeyPatch.context() as patch:

        def broken(_self: object, _rows: int) -> None:
            raise RuntimeError("the cache cannot be repaired")

        patch.setattr(LocalVerifier, "rollback", broken)
        with pytest.raises(RuntimeError, match="cannot be repaired"):
            _ = list(steps)
    assert engine.live_requests == 0
    assert answer(engine, request(SMALL_PROMPT, 2, 12)).ids == undisturbed(engine).ids[:12]


def test_pitfall_09_the_head_is_fed_the_pre_norm_hidden(demo: TextEngine) -> None:
    """mlx-lm#990: only acceptance shows it."""
    family: Any = demo.drafting._family  # pyright: ignore[reportPrivateUsage]
    norm, hidden, logits = family._body.norm, family.hidden, family.logits

    def unnormed(tokens: mx.array, caches: Any) -> mx.array:
        family._body.norm = nn.Identity()
        try:
            return hidden(tokens, caches)
        finally:
            family._body.norm = norm

    def normed(x: mx.array) -> mx.array:
        return logits(norm(x))

    right = accepted(demo, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "hidden", unnormed)
        patch.setattr(family, "logits", normed)
        wrong = accepted(demo, 3)
    assert wrong < right


@pytest.mark.parametrize("k", [0, 3])
def test_pitfall_11_processors_do_not_see_the_prompt(engine: TextEngine, k: int) -> None:
    """mlx-lm#990: the penalty's context began with the answer."""
    # The small model says nothing of its prompt: its first two ids stand for one.
    prompt = [*SMALL_PROMPT, *undisturbed(engine).ids[:2], *SMALL_PROMPT]
    plain = answer(engine, request(prompt, k, 16, ignore_end=True)).ids
    assert not set(prompt).isdisjoint(plain)
    never_again = Sampling(penalties=Penalties(presence=1000.0, context_size=100))
    ids = answer(engine, request(prompt, k, 16, sampling=never_again, ignore_end=True)).ids
    assert len({*ids, *prompt}) == 16 + len(set(prompt))
    chooser = Sampler(Sampling(penalties=Penalties(repetition=9.0)), 0, prompt=(3,))
    logits = mx.zeros((1, V)).at[:, 3].add(1.0).at[:, 5].add(0.5)
    assert as_ids(greedy_token(logits)) == [3]
    assert as_ids(chooser.token(logits, 1)) == [5]


@pytest.mark.parametrize("length", [4, 5, 6, 7])
def test_pitfall_12_a_token_that_was_not_emitted_stays_in_the_caches(length: int) -> None:
    """mlx-lm#990, exo#2110: the answer ended inside an accepted block."""
    told = tell(TARGET, TARGET, 3, ending=EndAt(length))
    text = [*PROMPT, *told.ids]
    assert told.verifier.ids == text[:-1]
    assert len(told.ids) == length


def test_pitfall_13_a_sampled_draft_is_accepted_by_argmax() -> None:
    """vllm-mlx#82: at temperature 1 an unlikely draft was kept as often as a likely one."""
    p = mx.log(mx.array([[0.9, 0.1] + [1e-9] * 6] * 2))
    kept = 0
    for seed in range(400):
        chooser = Sampler(Sampling(temperature=1.0), seed)
        q = mx.log(mx.array([[0.5, 0.5] + [1e-9] * 6]))
        drafts = chooser.draft(q, 5)
        accepted, ids = chooser.judge(p, drafts, 5).read()
        kept += ids[0] == 1
        assert accepted in (0, 1)
    assert 0.1 * 400 - 4 * 6 < kept < 0.1 * 400 + 4 * 6  # 6: the binomial's standard deviation


def test_pitfall_14_state_of_an_earlier_request_is_used_again(engine: TextEngine) -> None:
    """vllm-mlx#82. Log-probabilities show what a memorised answer would hide."""
    wanted = {"k": 2, "max_tokens": 20, "top_logprobs": 0}
    fresh = answer(small_engine(), request(SMALL_PROMPT, **wanted))
    _ = answer(engine, request(OTHER_PROMPT, 3, 12))
    with watched_heads() as seen:
        got = answer(engine, request(SMALL_PROMPT, **wanted))
    assert got.rounds == fresh.rounds
    assert [held for held, _ in seen] == [committed for _, committed in seen]


def test_pitfall_15_batch_dimensions_do_not_match(family: Any) -> None:
    """vllm-mlx#82: hidden, embedding and cache must agree in rows, whatever their number."""
    drafter = Counting(family, 3)
    for rows, position in ((5, 6), (1, 7), (4, 11)):
        hidden = mx.ones((1, rows, 64))
        drafter.observe(hidden, as_row([1] * rows))
        assert drafter.draft(3, position).tokens.shape == (3,)
    keys = drafter.cache.keys
    assert keys is not None
    assert keys.shape[0] == 1


def test_pitfall_16_deferred_drafts_come_out_of_order(engine: TextEngine) -> None:
    """vllm-mlx#82: evaluating drafts later must not change which belong to which round."""
    waiting = request(SMALL_PROMPT, 3, 32, async_draft_eval=False)
    overlapping = request(SMALL_PROMPT, 3, 32, async_draft_eval=True)
    assert answer(engine, waiting).rounds == answer(engine, overlapping).rounds


def test_pitfall_17_the_config_claims_a_head_that_was_stripped(tmp_path: Path) -> None:
    """Everywhere: conversions drop mtp.* and keep the config."""
    folder = make_checkpoint(tmp_path / "m", "qwen3_5", mtp=True)
    file = folder / "model.safetensors"
    mx.save_safetensors(str(file), {k: v for k, v in loaded(file).items() if "mtp." not in k})
    found = find_head(read_checkpoint(folder))
    assert isinstance(found, HeadMissing)
    assert "stripped" in found.reason
    assert "original repository" in found.reason


def test_pitfall_18_a_b_a_gives_the_same_answer_twice(engine: TextEngine) -> None:
    """vLLM#43559: a cache published at a speculative boundary changed later answers."""
    a = request(SMALL_PROMPT, 3, 20, top_logprobs=0)
    b = request(OTHER_PROMPT, 3, 12)
    first = answer(engine, a).rounds
    _ = answer(engine, b)
    assert answer(engine, a).rounds == first


def test_pitfall_19_a_partial_set_of_experts_is_used(tmp_path: Path) -> None:
    """Everywhere: missing experts draft nonsense without any error."""
    folder = make_checkpoint(tmp_path / "m", "qwen3_5_moe", experts="unfused")
    file = folder / "model.safetensors"
    weights = loaded(file)
    gone = next(name for name in weights if re.search(r"mtp.*experts\.1\.up_proj", name))
    mx.save_safetensors(str(file), {k: v for k, v in weights.items() if k != gone})
    found = find_head(read_checkpoint(folder))
    assert isinstance(found, HeadMissing)
    assert "experts.1.up_proj" in found.reason


def test_pitfall_20_memory_grows_as_blocks_step_over_the_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clearing when the number of tokens is a multiple of 256 never clears if rounds jump it."""
    cleared: list[int] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(1))
    table = np.tile(TARGET, (12, 1, 1))
    _ = tell(table, table, 2, max_tokens=2 * CLEAR_EVERY + 5)
    assert len(cleared) == 2


def test_pitfall_21_argmax_of_logits_is_not_that_of_rounded_log_probabilities() -> None:
    """exo#2110 used the one to accept and the other to replace."""
    logits = mx.random.normal((2000, 1024), key=mx.random.key(0)).astype(mx.bfloat16)
    stock = mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)
    assert not mx.array_equal(stock, mx.argmax(logits, axis=-1)), "a seed that shows nothing"
    assert mx.array_equal(greedy_token(logits), stock)
    chooser = Sampler(Sampling(), 0)
    verdict = chooser.judge(logits[:4], Drafts(stock[:3].astype(mx.int32), None), 0)
    assert verdict.read() == (3, as_ids(stock[:4]))
    assert as_ids(chooser.token(logits[:1], 0)) == as_ids(stock[:1])


def test_pitfall_22_norms_are_shifted_twice_or_not_at_all(tmp_path: Path) -> None:
    """mlx-lm#1442. Without the shift acceptance falls to nothing, and no error says so; a second
    one hardly shows, so the weights are compared: those of a converted head need no shift."""
    heads = [
        load_quietly(spec(folder, 0, 4, num_layers=4, native_mtp=True)).head
        for folder in (
            make_checkpoint(
                tmp_path / str(raw), "qwen3_5", dtype="float32", vocab=4096, raw=raw, seed=3
            )
            for raw in (True, False)
        )
    ]
    raw, converted = (
        {name: module.weight for name, module in head.named_modules() if "norm" in name}
        for head in heads
    )
    assert len(raw) == 7
    assert all(mx.allclose(raw[name], converted[name], atol=1e-6) for name in converted)
    engine = whole_engine()
    for name, module in engine.drafting._head.named_modules():  # pyright: ignore
        if "norm" in name:
            module.weight = module.weight - 1.0
    assert accepted(engine, 1, answers=2) == 0


@pytest.mark.parametrize("budget", [1, 2, 3, 4])
def test_pitfall_23_more_is_drafted_than_the_budget_has_left(budget: int) -> None:
    """exo#2110: rows past max_tokens stayed in the caches."""
    told = tell(TARGET, TARGET, 3, max_tokens=budget)
    assert isinstance(told.drafter, TableDrafter)
    # The prompt gives the first token, and a round one more than its drafts.
    assert told.drafter.asked == ([budget - 2] if budget > 2 else [])
    assert told.verifier.ids == [*PROMPT, *told.ids][:-1]


def test_pitfall_24_an_answer_is_dropped_inside_a_block(engine: TextEngine) -> None:
    """exo#2110: nothing handled the generator's close."""
    steps = engine.generate(request(SMALL_PROMPT, 3))
    while not (isinstance(step := next(steps), Delta) and step.round.accepted):
        pass
    steps.close()
    assert (engine.live_requests, engine.cache_bytes()) == (0, 0)
    assert answer(engine, request(SMALL_PROMPT, 3, 12)).ids == undisturbed(engine).ids[:12]


def test_pitfall_25_the_head_is_not_primed_with_the_prompt(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-mlx#82 ran the head without a cache; MTPLX measured 0.90 against 0.26.

    When the first draft is made, the head's cache holds every row of the prompt.
    """
    observe, rows = NativeDrafter.observe, len(SMALL_PROMPT)

    def first() -> tuple[int, int]:
        with watched_heads() as seen:
            _ = answer(engine, request(SMALL_PROMPT, 1, 8))
        return seen[0]

    def unprimed(self: NativeDrafter, hidden: mx.array | None, tokens: mx.array) -> None:
        if tokens.shape[0] + 1 != rows:
            observe(self, hidden, tokens)

    assert first() == (rows, rows)
    monkeypatch.setattr(NativeDrafter, "observe", unprimed)
    held, committed = first()
    assert held < committed == rows, "a fault that this would not show"


def test_pitfall_26_the_head_belongs_to_a_model_of_another_size(tmp_path: Path) -> None:
    """exo's forks: a head was grafted on whatever was loaded."""
    small = make_checkpoint(tmp_path / "small", "qwen3_5", hidden=64)
    grafted = make_checkpoint(tmp_path / "grafted", "qwen3_5", hidden=128)
    large = make_checkpoint(tmp_path / "large", "qwen3_5", hidden=128, mtp=False)
    other = {f"mtp.{k}": v for k, v in head_tensors(small).items()}
    mx.save_safetensors(str(large / "mtp.safetensors"), other)
    found = find_head(read_checkpoint(large))
    assert isinstance(found, HeadMissing)
    assert "shape" in found.reason
    own = family_of(taped_qwen())  # of 64 wide hiddens, and other projections
    assert own is not None
    unusable = load_head(own, HeadSource(head_tensors(grafted), False), mx.float32)
    assert isinstance(unusable, HeadUnusable)
    assert "has shape" in unusable.reason


# ---------------------------------------------------------------- found beside the 26


def test_pitfall_27_two_calls_of_a_recurrent_layer_are_mixed_up() -> None:
    """Captured states were indexed by call: a tape must be its own layer's and its forward's."""
    model = taped_qwen()
    caches = with_tapes(model.make_cache())
    family = family_of(model)
    assert family is not None
    ids = [[(5 * i + j) % VOCABULARY for i in range(4)] for j in range(3)]
    _ = family.hidden(mx.array([ids[0]]), caches)
    _ = family.hidden(mx.array([ids[1]]), caches)
    rollback(caches, 2)
    got = family.hidden(mx.array([ids[2]]), caches)
    again = with_tapes(model.make_cache())
    _ = family.hidden(mx.array([ids[0] + ids[1][:2]]), again)
    assert mx.array_equal(got, family.hidden(mx.array([ids[2]]), again))


def test_pitfall_28_a_parked_head_falls_behind(family: Any) -> None:
    """omlx: a drafter that was off for a while drafted from a cache with a gap."""
    drafter = Counting(family, 1)
    for position in range(200):
        drafter.observe(mx.ones((1, 1, 64)), as_row([position % VOCABULARY]))
    _ = drafter.draft(1, 201)
    assert drafter.held == [(200, 200)]


def test_each_of_the_26_has_its_test() -> None:
    names = [name for name in dir(sys.modules[__name__]) if name.startswith("test_pitfall_")]
    numbers = sorted([int(n.split("_")[2]) for n in names] + [int(n[:2]) for n in ELSEWHERE])
    assert numbers[:26] == list(range(1, 27))
    assert len(set(numbers)) == len(numbers)
    for place in ELSEWHERE.values():
        file, test = place.split("::")
        assert f"def {test}(" in next(Path(__file__).parents[1].rglob(file)).read_text()
