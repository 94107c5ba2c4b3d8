"""The native drafter's cache holds the committed rows, all of them and nothing else."""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from tables import EndAt
from tiny import VOCABULARY, family, row_of_ids, taped_qwen

from exo_node.mtp.drafters import NativeDrafter, NoDrafter
from exo_node.mtp.family import family_of
from exo_node.mtp.head import MtpHead
from exo_node.mtp.loop import Generation
from exo_node.mtp.qwen35 import Qwen35Family
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.seams import Block, Drafts, Wait, Want, as_ids, as_row
from exo_node.mtp.task import Task
from exo_node.mtp.types import Round, Sampling

HIDDEN = 64
ROUNDS = 62
PROMPT = (5, 9, 2, 60, 33)
FAMILY = family()


def made_head() -> MtpHead:
    mx.random.seed(1)
    return FAMILY.make_head()


HEAD = made_head()


def hidden_at(position: int, token: int) -> mx.array:
    """(1, 1, H): an arbitrary hidden that belongs to a token at a position."""
    return mx.random.normal((1, 1, HIDDEN), key=mx.random.key(1000 * position + token))


class Judge:
    """A `Verifier` that accepts the draft for a position when `accepts` says so."""

    overlaps = False
    takes_back = True

    def __init__(self, accepts: Callable[[int], bool]) -> None:
        self.ids: list[int] = []
        self._accepts = accepts

    @property
    def position(self) -> int:
        return len(self.ids)

    def forward(self, tokens: mx.array, *, want: Want) -> Generator[Wait, None, Block]:
        start, ids = self.position, as_ids(tokens)
        self.ids += ids
        upcoming = [*ids[1:], (7 * self.position) % VOCABULARY]
        chosen = [
            token if self._accepts(start + row + 1) else (token + 1) % VOCABULARY
            for row, token in enumerate(upcoming)
        ]
        hidden = [hidden_at(start + row, token) for row, token in enumerate(ids)]
        logits = 50.0 * mx.eye(VOCABULARY)[as_row(chosen)]
        return Block(logits if want == "all" else logits[-1:], mx.concatenate(hidden, axis=1))
        yield

    def rollback(self, rows: int) -> None:
        del self.ids[-rows:]

    def arrays(self) -> list[mx.array]:
        return []


class Watched(NativeDrafter):
    """Notes the rows that its cache holds after each draft, speculative ones aside."""

    def __init__(self, chooser: Sampler, k: int, *, overlap: bool = True) -> None:
        super().__init__(HEAD, FAMILY.embed, FAMILY.logits, chooser, k, overlap=overlap)
        self.lengths: list[tuple[int, int]] = []

    def draft(self, k: int, position: int) -> Drafts:
        drafts = super().draft(k, position)
        committed_tokens = position
        self.lengths.append((self.cache.offset - (k - 1), committed_tokens - 1))
        return drafts


class Untrimmed(Watched):
    """Forgets to drop what drafting wrote."""

    def _append_pending(self) -> mx.array:
        self._speculative = 0
        return super()._append_pending()


class Holed(Watched):
    """exo#2110: the last row of a block that was accepted as a whole is lost."""

    def observe(self, hidden: mx.array | None, tokens: mx.array) -> None:
        assert hidden is not None
        whole = tokens.shape[0] == self.k + 1
        super().observe(hidden[:, :-1], tokens[:-1]) if whole else super().observe(hidden, tokens)


ACCEPTS: dict[str, Callable[[int], bool]] = {
    "all": lambda _: True,
    "none": lambda _: False,
    "some": lambda position: position * position % 7 < 4,
}


def drive(drafter: NativeDrafter, accepts: str, rounds: int = ROUNDS) -> list[int]:
    """Runs the loop for `rounds` rounds; the ids of prompt and answer."""
    judge = Judge(ACCEPTS[accepts])
    task = Task(PROMPT, 10_000, prefill_chunk=3)
    text = [*PROMPT]
    steps = Generation(task, judge, drafter, Sampler(Sampling(), 0), EndAt()).steps()
    done = 0
    for step in steps:
        if isinstance(step, Round):
            text += step.tokens
            done += 1
            if done == rounds + 1:
                break
    return text


def is_whole(drafter: Watched) -> bool:
    return all(held == wanted for held, wanted in drafter.lengths)


def greedy() -> Sampler:
    return Sampler(Sampling(), 0)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("accepts", ACCEPTS)
def test_the_heads_cache_holds_all_committed_tokens_but_one(k: int, accepts: str) -> None:
    drafter = Watched(greedy(), k)
    emitted = len(drive(drafter, accepts)) - len(PROMPT) - 1
    assert len(drafter.lengths) == ROUNDS + 1, "the next round's drafts are under way"
    assert emitted == {"all": (k + 1) * ROUNDS, "none": ROUNDS}.get(accepts, emitted)
    assert is_whole(drafter)


@pytest.mark.parametrize(("kind", "accepts"), [(Untrimmed, "none"), (Holed, "all")])
def test_the_same_check_finds_a_hole(kind: type[Watched], accepts: str) -> None:
    drafter = kind(greedy(), 2)
    _ = drive(drafter, accepts)
    assert not is_whole(drafter)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("accepts", ACCEPTS)
def test_its_rows_are_those_of_one_pass_over_the_targets_hiddens(k: int, accepts: str) -> None:
    drafter = Watched(greedy(), k)
    text = drive(drafter, accepts, rounds=12)
    # The next round's drafts have been made, and with them the rows committed last.
    hidden = [hidden_at(position, token) for position, token in enumerate(text[:-1])]
    once = KVCache()
    _ = HEAD(mx.concatenate(hidden, axis=1), FAMILY.embed(as_row(text[1:])[None]), once)
    assert drafter.cache.offset - (k - 1) == once.offset == len(text) - 1
    for held, wanted in ((drafter.cache.keys, once.keys), (drafter.cache.values, once.values)):
        assert held is not None and wanted is not None
        assert mx.array_equal(held[..., : once.offset, :], wanted[..., : once.offset, :])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
@pytest.mark.parametrize("earlier", [1, 2, 3])
def test_drafts_do_not_depend_on_rejected_ones(earlier: int, sampling: Sampling) -> None:
    def second_drafts(first: int) -> list[int]:
        drafter = Watched(Sampler(sampling, 8), 3)
        drafter.observe(hidden_at(0, 1), as_row([2]))
        if first:
            _ = drafter.draft(first, 2)
        drafter.observe(hidden_at(1, 2), as_row([3]))
        return as_ids(drafter.draft(3, 3).tokens)

    assert second_drafts(earlier) == second_drafts(0)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_each_draft_follows_from_the_heads_own_output_of_the_one_before(
    sampling: Sampling,
) -> None:
    chooser = Sampler(sampling, 8)
    drafter = Watched(chooser, 3)
    drafter.observe(hidden_at(0, 1), as_row([2]))
    hidden, token, cache, wanted = hidden_at(0, 1), as_row([2]), KVCache(), list[Drafts]()
    for position in (2, 3, 4):
        hidden = HEAD(hidden, FAMILY.embed(token[None]), cache)
        wanted.append(chooser.draft(FAMILY.logits(hidden)[0], position, wanted))
        token = wanted[-1].tokens
    assert as_ids(drafter.draft(3, 2).tokens) == [as_ids(draft.tokens)[0] for draft in wanted]


def test_sampled_drafts_keep_a_row_of_log_probabilities_each() -> None:
    drafter = Watched(Sampler(Sampling(temperature=1.0), 0), 3)
    drafter.observe(hidden_at(0, 1), as_row([2]))
    drafts = drafter.draft(3, 2)
    assert drafts.log_probabilities is not None
    assert drafts.log_probabilities.shape == (3, VOCABULARY)
    assert drafts.tokens.shape == (3,)


def test_overlap_decides_only_whether_drafting_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noting(name: str) -> Callable[..., None]:
        evaluate: Callable[..., None] = getattr(mx, name)

        def called(*arrays: Any) -> None:
            calls.append(name)
            evaluate(*arrays)

        return called

    texts: list[list[int]] = []
    for overlap, name in ((True, "async_eval"), (False, "eval")):
        with monkeypatch.context() as patch:
            patch.setattr(mx, name, noting(name))
            drafter = Watched(greedy(), 2, overlap=overlap)
        texts.append(drive(drafter, "some", rounds=5))
    assert calls == ["async_eval"] * 6 + ["eval"] * 6
    assert texts[0] == texts[1]


def test_a_head_that_is_handed_over_behind_drafts_holds_committed_rows_only() -> None:
    """An answer may join a batch after the drafts of its next round were issued."""
    drafter, another = Watched(greedy(), 3), Watched(greedy(), 3)
    drafter.observe(hidden_at(0, 1), as_row([2]))
    drafts = as_ids(drafter.draft(3, 2).tokens)
    state = drafter.hand_over()
    assert state.rows == state.cache.offset == 1 and drafter.arrays() == []
    another.take_up(state, ())
    assert as_ids(another.draft(3, 2).tokens) == drafts


def test_what_a_request_holds_is_listed() -> None:
    drafter = Watched(greedy(), 2)
    assert drafter.arrays() == []
    drafter.observe(hidden_at(0, 1), as_row([2]))
    assert [array.shape for array in drafter.arrays()] == [(1, 1, HIDDEN)]
    _ = drafter.draft(1, 2)
    assert len(drafter.arrays()) == 2


def test_a_drafter_without_a_hidden_to_draft_from_is_a_bug() -> None:
    drafter = Watched(greedy(), 1)
    with pytest.raises(AssertionError, match="nothing was committed"):
        _ = drafter.draft(1, 1)
    with pytest.raises(AssertionError, match="gave no hidden"):
        drafter.observe(None, as_row([1]))
    with pytest.raises(AssertionError, match="k = 0"):
        _ = NoDrafter().draft(1, 1)


def test_the_head_reads_the_embedding_first_then_the_hidden() -> None:
    hidden, embedding = mx.random.normal((2, 1, 5, HIDDEN), key=mx.random.key(2))
    head, cache = HEAD, KVCache()
    joined = [head.pre_fc_norm_embedding(embedding), head.pre_fc_norm_hidden(hidden)]
    x = mx.concatenate(joined, axis=-1) @ head.fc.weight.T
    layer: Any = head.layers[0]
    wanted = head.norm(layer(x, mask=create_attention_mask(x, cache), cache=cache))
    assert mx.allclose(head(hidden, embedding, KVCache()), wanted, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"moe": True}], ids=str)
def test_a_familys_hidden_and_logits_make_up_the_models_own(changes: dict[str, Any]) -> None:
    model = taped_qwen(**changes)
    parts, ids = family_of(model), row_of_ids(6)[None]
    assert isinstance(parts, Qwen35Family)
    whole = model(ids, cache=model.make_cache())
    assert mx.array_equal(parts.logits(parts.hidden(ids, model.make_cache())), whole)
    assert not parts.make_head().layers[0].is_linear


def test_other_models_have_no_family() -> None:
    assert family_of(nn.Linear(2, 2)) is None
