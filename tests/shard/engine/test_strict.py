"""Strict mode: on a backend whose numbers depend on the row count, drafts cannot change an answer.

The engine is the real one, over tiny models whose every linear layer depends on its row count.
"""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3_5
from shims import by_call, by_contents, by_rows, perturb
from tables import random_table, tell
from test_probe import subject_of
from tiny import VOCABULARY, taped_qwen

from exo_node.mtp.caches.rollback import with_tapes
from exo_node.mtp.families.qwen35 import Qwen35Family
from exo_node.mtp.pieces import result_of
from exo_node.mtp.probe import fixed_rows_identity, greedy_identity, live_arrays
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.targets import FamilyTarget
from exo_node.mtp.types import Round, Sampling
from exo_node.shard.engine.drafter import DraftModel
from exo_node.shard.tools.bare_engine import bare_engine, bare_request, ids_of, rounds_of

MADE: dict[str, dict[str, Any]] = {"dense": {}, "moe": {"moe": True}}
SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=1.0, top_p=0.95, seed=11),
}
PROMPT = tuple((5 * i + 2) % VOCABULARY for i in range(19))
KS = {
    ("dense", "greedy"): (1, 5),
    ("dense", "seeded"): (3,),
    ("moe", "greedy"): (2,),
    ("moe", "seeded"): (3,),
}
TOKENS = 40
ROWS = 6
WRONG = 0.25


class Scripted:
    """Drafts what a run without drafts gave, some tokens of it wrong."""

    def __init__(self, script: Sequence[int], k: int) -> None:
        self.k = k
        wrong = Random(k)
        ids = [(token + 1) % VOCABULARY if wrong.random() < WRONG else token for token in script]
        self._script = mx.array([*PROMPT, *ids, *([0] * 2 * ROWS)])
        self.model = DraftModel(self._head, self._embed, self._logits)

    def _embed(self, ids: mx.array) -> mx.array:
        return ids[..., None]

    def _head(self, hidden: mx.array, embedding: mx.array, cache: Any) -> mx.array:
        """The position after the token that each row is told of."""
        begin, rows = cache.offset, embedding[:, None].astype(mx.float32)
        _ = cache.update_and_fetch(rows, rows)
        return mx.arange(begin + 2, begin + 2 + hidden.shape[1])[None, :, None]

    def _logits(self, positions: mx.array) -> mx.array:
        chosen = mx.arange(VOCABULARY) == self._script[positions]
        return 100.0 * chosen.astype(mx.float32)


@dataclass(frozen=True, slots=True)
class StrictAnswer:
    rounds: tuple[Round, ...]
    caches: list[Any]

    @property
    def ids(self) -> tuple[int, ...]:
        return ids_of(self.rounds)


def model_of(name: str, shim: Callable[[mx.array, int], Any] | None = by_rows) -> qwen3_5.Model:
    model = taped_qwen(**MADE[name])
    if shim is not None:
        assert perturb(model, shim, size=2e-2) > 20
    return model


def tell_strict(
    model: qwen3_5.Model,
    rows: int,
    sampling: Sampling = SAMPLINGS["greedy"],
    drafts: Scripted | None = None,
) -> StrictAnswer:
    """`rows` 0: not strict."""
    caches: list[Any] = []

    def make_caches() -> list[Any]:
        caches[:] = with_tapes(model.make_cache())
        return list(caches)

    engine = bare_engine(
        FamilyTarget(Qwen35Family(model)),
        make_caches,
        drafts.model if drafts else None,
        fixed_rows=rows,
    )
    chooser, k = Sampler(sampling, 0), drafts.k if drafts else 0
    engine_request = bare_request(PROMPT, TOKENS, 8, k, sampler=chooser, top_logprobs=0)
    (rounds,) = rounds_of(engine, [engine_request])
    return StrictAnswer(rounds, caches)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_change_the_answer_without_strict_and_never_with_it(
    name: str, sampling: str
) -> None:
    model, how = model_of(name), SAMPLINGS[sampling]
    plain = {rows: tell_strict(model, rows, how) for rows in (0, ROWS)}
    assert len(plain[ROWS].ids) == TOKENS
    differ = 0
    for k in KS[name, sampling]:
        free = tell_strict(model, 0, how, Scripted(plain[0].ids, k))
        differ += free.ids != plain[0].ids
        strict = tell_strict(model, ROWS, how, Scripted(plain[ROWS].ids, k))
        assert strict.ids == plain[ROWS].ids
        accepted_counts = {r.accepted for r in strict.rounds if r.drafted == k}
        assert len(accepted_counts) > 1, "rounds that accept and rounds that reject"
    message = "every K must be seen to differ, or the shim shows nothing"
    assert differ == len(KS[name, sampling]), message


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("k", [0, 2])
def test_rows_do_not_see_the_padding_after_them(
    name: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks are causal: nothing of a later row flows into an earlier one."""
    model = model_of(name)
    script = tell_strict(model, 4).ids

    def with_padding(padding: int) -> StrictAnswer:
        monkeypatch.setattr("exo_node.shard.engine.batch.PADDING_ID", padding)
        return tell_strict(model, 4, drafts=Scripted(script, k) if k else None)

    one, other = with_padding(0), with_padding(33)
    assert one.rounds == other.rounds  # with log-probabilities, which tell what tokens may not
    for a, b in zip(live_arrays(one.caches), live_arrays(other.caches), strict=True):
        assert mx.array_equal(a, b)


@pytest.mark.parametrize("k", [0, 2])
def test_each_round_has_the_same_rows_and_leaves_those_of_its_tokens(k: int) -> None:
    table = random_table(6, seed=1)
    got = tell(table, table if k else None, k, fixed_rows=4)
    assert got.target.forwards[0] == (3, "last")
    assert set(got.target.forwards[1:]) == {(4, "all")}
    assert got.cached_ids == [1, 0, 2, *got.ids[:-1]]
    assert got.ids == tell(table).ids


def probes(model: qwen3_5.Model, rows: int) -> tuple[str, str]:
    """greedy_identity, and why strict mode refuses drafts."""
    subject = subject_of(model)
    fixed = result_of(fixed_rows_identity(subject, rows))
    return result_of(greedy_identity(subject, rows - 1)), fixed.reason


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("rows", [2, 4])
def test_the_probe_finds_fixed_rows_exact_where_only_the_row_count_matters(
    name: str, rows: int
) -> None:
    assert probes(model_of(name, None), rows) == ("bitwise", "")
    assert probes(model_of(name), rows) == ("near_tie", "")


@pytest.mark.parametrize("shim", [by_contents, by_call()])
def test_a_backend_that_fixed_rows_do_not_mend_refuses_drafts_with_its_reason(shim: Any) -> None:
    identity, reason = probes(model_of("dense", shim), 4)
    assert identity == "near_tie"
    assert "every forward has 4 rows" in reason
    assert "unset EXO_NATIVE_MTP_STRICT" in reason


@pytest.mark.parametrize("only", ["v_proj", "in_proj_qkv"])
def test_a_backend_that_only_writes_other_rows_into_its_caches_is_refused(only: str) -> None:
    model = taped_qwen()
    assert perturb(model, by_contents, only=only)
    assert probes(model, 4)[1]
