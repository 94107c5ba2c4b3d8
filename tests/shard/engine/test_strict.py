"""Strict mode: on a backend whose numbers depend on the row count, drafts cannot change an answer.

The loop is the real one, over tiny models whose every linear layer depends on its row count.
"""

# mlx is typed in part only.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3_5
from shims import by_call, by_contents, by_rows, perturb
from tables import EndAt, TableVerifier, random_table
from tiny import VOCABULARY, taped_qwen

from exo_node.mtp.drafters import NativeDrafter, NoDrafter
from exo_node.mtp.fixed_rows import PADDING_ID, FixedRows
from exo_node.mtp.loop import Generation
from exo_node.mtp.probe import fixed_rows_identity, greedy_identity, live_arrays
from exo_node.mtp.qwen35 import Qwen35Family
from exo_node.mtp.rollback import with_tapes
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.seams import Block, Drafter, Drafts, Verifier, Want, as_row
from exo_node.mtp.task import Task
from exo_node.mtp.types import Round, Sampling
from exo_node.shard.engine.local import FamilyTarget, LocalVerifier

MADE: dict[str, dict[str, Any]] = {"dense": {}, "moe": {"moe": True}}
SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=1.0, top_p=0.95, seed=11),
}
PROMPT = tuple((5 * i + 2) % VOCABULARY for i in range(19))
KS = {
    ("dense", "greedy"): (1, 2, 3, 5),
    ("dense", "seeded"): (1, 3),
    ("moe", "greedy"): (2, 5),
    ("moe", "seeded"): (3,),
}
TOKENS = 40
ROWS = 6
WRONG = 0.25


class Scripted:
    """Drafts what a run without drafts gave, some tokens of it wrong."""

    rests = False

    def __init__(self, script: Sequence[int], k: int) -> None:
        self.k = k
        wrong = Random(k)
        self._script = [
            (token + 1) % VOCABULARY if wrong.random() < WRONG else token for token in script
        ]

    def draft(self, k: int, position: int) -> Drafts:
        start = position - len(PROMPT)
        ids = self._script[start : start + k]
        return Drafts(as_row(ids + [0] * (k - len(ids))), None)

    def observe(self, hidden: mx.array | None, tokens: mx.array) -> None:
        del hidden, tokens

    def catch_up(self) -> None:
        pass

    def arrays(self) -> list[mx.array]:
        return []


@dataclass(frozen=True, slots=True)
class Told:
    ids: tuple[int, ...]
    rounds: tuple[Round, ...]
    caches: list[Any]
    verifier: Verifier


def model_of(name: str, shim: Callable[[mx.array, int], Any] | None = by_rows) -> qwen3_5.Model:
    model = taped_qwen(**MADE[name])
    if shim is not None:
        assert perturb(model, shim, size=2e-2) > 20
    return model


def told(
    model: qwen3_5.Model,
    rows: int,
    sampling: Sampling,
    make_drafter: Callable[[Sampler], Drafter] = lambda _: NoDrafter(),
    tokens: int = TOKENS,
) -> Told:
    """`rows` 0: not strict."""
    caches: list[Any] = with_tapes(model.make_cache())
    local = LocalVerifier(FamilyTarget(Qwen35Family(model)), caches)
    verifier: Verifier = FixedRows(local, rows) if rows else local
    chooser = Sampler(sampling, 0)
    task = Task(PROMPT, tokens, prefill_chunk=8)
    steps = Generation(task, verifier, make_drafter(chooser), chooser, EndAt()).steps()
    rounds = tuple(step for step in steps if isinstance(step, Round))
    return Told(tuple(t for r in rounds for t in r.tokens), rounds, caches, verifier)


def scripted(plain: Told, k: int) -> Callable[[Sampler], Drafter]:
    return lambda _: Scripted(plain.ids, k)


def native(model: qwen3_5.Model, k: int) -> Callable[[Sampler], Drafter]:
    """With a head of random weights: nearly all that it drafts is rejected."""
    family = Qwen35Family(model)
    mx.random.seed(5)
    head = family.make_head()
    mx.eval(head.parameters())
    return lambda chooser: NativeDrafter(
        head, family.embed, family.lm_head, chooser, k, overlap=True
    )


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_change_the_answer_without_strict_and_never_with_it(
    name: str, sampling: str
) -> None:
    model, how = model_of(name), SAMPLINGS[sampling]
    plain = {rows: told(model, rows, how) for rows in (0, ROWS)}
    assert len(plain[ROWS].ids) == TOKENS
    differ = 0
    for k in KS[name, sampling]:
        free = told(model, 0, how, scripted(plain[0], k))
        differ += free.ids != plain[0].ids
        strict = told(model, ROWS, how, scripted(plain[ROWS], k))
        assert strict.ids == plain[ROWS].ids
        kept = {r.accepted for r in strict.rounds if r.drafted == k}
        assert len(kept) > 1, "rounds that accept and rounds that reject"
    seen = "every K must be seen to differ, or the shim shows nothing"
    assert differ == len(KS[name, sampling]), seen


@pytest.mark.parametrize("name", MADE)
def test_drafts_of_a_head_change_nothing_in_strict_mode(name: str) -> None:
    model = model_of(name)
    plain = told(model, ROWS, Sampling(), tokens=40)
    for k in (1, 3):
        strict = told(model, ROWS, Sampling(), native(model, k), tokens=40)
        assert strict.ids == plain.ids
        assert any(r.accepted < r.drafted for r in strict.rounds)


def test_a_router_alone_flips_the_answer_and_strict_mode_holds_it() -> None:
    """Of a mixture of experts the router flips first."""
    model = taped_qwen(moe=True)
    assert perturb(model, by_rows, only=".mlp.gate", size=5e-2) == 4
    free = told(model, 0, Sampling())
    assert told(model, 0, Sampling(), scripted(free, 3)).ids != free.ids
    plain = told(model, ROWS, Sampling())
    assert told(model, ROWS, Sampling(), scripted(plain, 3)).ids == plain.ids


def test_the_caches_end_as_those_of_plain_decoding() -> None:
    model = model_of("dense")
    plain = told(model, ROWS, Sampling())
    strict = told(model, ROWS, Sampling(), scripted(plain, 3))
    assert plain.verifier.position == strict.verifier.position == len(PROMPT) + TOKENS - 1
    assert plain.verifier.overlaps
    _, _ = plain.verifier.arrays(), strict.verifier.arrays()
    for a, b in zip(live_arrays(plain.caches), live_arrays(strict.caches), strict=True):
        assert mx.array_equal(a, b)


def forward_block(verifier: Verifier, ids: Sequence[int], want: Want = "all") -> Block:
    steps = verifier.forward(as_row(ids), want=want)
    with pytest.raises(StopIteration) as end:
        next(steps)
    return end.value.value


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("real", [1, 2, 3])
def test_rows_do_not_see_the_padding_behind_them(
    name: str, real: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks are causal: nothing of a later row flows into an earlier one."""
    model = model_of(name)

    def seen(padding: int) -> list[mx.array]:
        monkeypatch.setattr("exo_node.mtp.fixed_rows.PADDING_ID", padding)
        caches: list[Any] = with_tapes(model.make_cache())
        verifier = FixedRows(LocalVerifier(FamilyTarget(Qwen35Family(model)), caches), 4)
        _ = forward_block(verifier, PROMPT, "last")
        block = forward_block(verifier, PROMPT[:real])
        assert block.hidden is not None
        assert block.logits.shape[0] == block.hidden.shape[1] == real
        assert verifier.position == len(PROMPT) + real
        _ = verifier.arrays()
        return [block.logits, block.hidden, *live_arrays(caches)]

    for a, b in zip(seen(PADDING_ID), seen(33), strict=True):
        assert mx.array_equal(a, b)


def table(rows: int = 4) -> tuple[TableVerifier, FixedRows]:
    inner = TableVerifier(random_table(8, seed=1), overlaps=True)
    return inner, FixedRows(inner, rows)


def test_padding_and_rejected_rows_go_in_one_rollback() -> None:
    inner, strict = table()
    _ = forward_block(strict, [1, 2, 3], "last")
    _ = forward_block(strict, [4, 5, 6])
    strict.rollback(2)
    _ = forward_block(strict, [7])
    _ = forward_block(strict, [1, 2, 3, 4])
    assert strict.position == 9
    assert inner.ids == [1, 2, 3, 4, 7, 1, 2, 3, 4]
    assert inner.calls == [
        "forward 3 last",
        "forward 4 all",
        "rollback 3",
        "forward 4 all",
        "rollback 3",
        "forward 4 all",
    ]


def test_what_reads_the_caches_finds_no_padding() -> None:
    inner, strict = table()
    _ = forward_block(strict, [1, 2])
    assert (strict.position, inner.position) == (2, 4)
    _ = strict.arrays()
    _ = strict.arrays()
    assert inner.ids == [1, 2]
    assert inner.calls == ["forward 4 all", "rollback 2"]


def test_more_rows_than_strict_mode_has_are_an_error() -> None:
    inner, strict = table()
    with pytest.raises(ValueError, match="5 rows do not fit into strict mode's forwards of 4"):
        _ = next(strict.forward(as_row([1, 2, 3, 4, 5]), want="all"))
    assert inner.calls == []
    with pytest.raises(ValueError, match="1 row or more"):
        _ = FixedRows(inner, 0)


def test_a_verifier_that_waits_is_waited_for() -> None:
    inner = TableVerifier(random_table(8, seed=1), waits=True)
    strict = FixedRows(inner, 3)
    steps: Generator[Any, None, Block] = strict.forward(as_row([1]), want="all")
    assert next(steps).future.done()
    with pytest.raises(StopIteration):
        next(steps)
    assert strict.position == 1


def probes(model: qwen3_5.Model, rows: int) -> tuple[str, str]:
    """greedy_identity, and why strict mode refuses drafts."""
    target = FamilyTarget(Qwen35Family(model))

    def make_caches() -> list[Any]:
        return with_tapes(model.make_cache())

    identity = greedy_identity(target.forward, make_caches, VOCABULARY, rows - 1)
    return identity, fixed_rows_identity(target.forward, make_caches, VOCABULARY, rows).reason


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
