"""The probe tells a backend that computes a request otherwise in a batch from one that does not."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache
from plain_gated_delta import give_kernels
from shims import by_rows, perturb
from tiny import VOCABULARY, taped_qwen

from exo_node.mtp.batch_probe import (
    batch_identity,
    rows_to_probe,
    same_prompts,
    warm_up_batches,
)
from exo_node.mtp.caches.batch_caches import drop_rejected, left_aligned
from exo_node.mtp.caches.positions import Positions
from exo_node.mtp.caches.rollback import TapedCache, cache_arrays, state_arrays, with_tapes
from exo_node.mtp.families.qwen35 import Qwen35Family
from exo_node.mtp.families.taped_gated_delta import TapedGatedDelta, row_state_bytes, rows_with_room
from exo_node.mtp.pieces import result_of
from exo_node.mtp.probe import Subject
from exo_node.mtp.targets import FamilyTarget
from exo_node.mtp.types import MAX_ROUND_ROWS


def subject_of(model: Any) -> Subject:
    def make_caches() -> list[Any]:
        return with_tapes(model.make_cache())

    target = FamilyTarget(Qwen35Family(model))
    return Subject(target, make_caches, VOCABULARY, 1200, lambda: 0.0)


def probe(model: Any, k: int) -> str:
    return result_of(batch_identity(subject_of(model), k))


def shares_prompts(model: Any) -> bool:
    return result_of(same_prompts(subject_of(model)))


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize(
    "model_kind", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"moe": True}], ids=str
)
def test_the_cpu_is_bitwise(model_kind: dict[str, Any], k: int) -> None:
    model = taped_qwen(**model_kind)
    assert probe(model, k) == "bitwise"
    assert shares_prompts(model)


@pytest.mark.parametrize("only", ["", "v_proj", "in_proj_qkv", "lm_head"])
def test_numbers_that_depend_on_the_batch_are_near_tie(only: str) -> None:
    model = taped_qwen()
    assert perturb(model, by_rows, only=only)
    assert probe(model, 0) == probe(model, 2) == "near_tie"
    assert shares_prompts(model) == (only == "lm_head")  # a row of each prompt


def test_products_that_differ_from_65_rows_on_leave_rounds_bitwise() -> None:
    """As with unpacked weights on CUDA: only prompts of the batch have so many rows."""
    model = taped_qwen()
    assert perturb(model, lambda x, rows: by_rows(x, rows) if rows > 64 else 0.0)
    assert probe(model, 2) == "bitwise"
    assert not shares_prompts(model)


def test_a_mask_that_shows_another_requests_length_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The seeded fault: all requests see as far back as the longest."""
    stock = Positions.mask

    def long(self: Positions, rows: int, window: int | None) -> mx.array:
        shape = (len(self.rows), 1, rows, self.extent(rows))
        return mx.broadcast_to(stock(self, rows, window)[:1], shape)

    monkeypatch.setattr(Positions, "mask", long)
    assert probe(taped_qwen(), 1) == "near_tie"


def test_a_prompt_that_keeps_anothers_padding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeded fault: recurrent states read on to the end of the longest prompt."""

    def endless(self: ArraysCache, rows: int) -> None:
        del self, rows

    monkeypatch.setattr(ArraysCache, "make_mask", endless)
    assert not shares_prompts(taped_qwen())


def test_states_that_keep_rejected_rows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(caches: Sequence[object], rows: int, row_counts: Sequence[int]) -> None:
        del caches, rows, row_counts

    monkeypatch.setattr("exo_node.mtp.batch_probe.drop_rejected", nothing)
    assert probe(taped_qwen(), 1) == "near_tie"


@pytest.mark.parametrize(
    ("k", "most_rows", "shapes"), [(3, 64, {(3, 4), (16, 4)}), (7, 16, {(3, 5)})]
)
def test_a_probed_round_has_the_rows_for_which_there_is_memory(
    k: int, most_rows: int, shapes: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, probed, stock = taped_qwen(), set[tuple[int, ...]](), FamilyTarget.forward_batch

    def noted(self: FamilyTarget, tokens: mx.array, caches: Sequence[Any]) -> Any:
        probed.add(tuple(tokens.shape))
        return stock(self, tokens, caches)

    monkeypatch.setattr(FamilyTarget, "forward_batch", noted)
    assert result_of(batch_identity(subject_of(model), k, most_rows=most_rows)) == "bitwise"
    assert {shape for shape in probed if shape[1] > 1} == shapes


def test_rows_whose_states_a_kernel_keeps_have_room_below_the_memory_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sixteenth of the limit is left to other arrays, and sixteen requests have states before the
    round, too."""
    model = taped_qwen()
    assert row_state_bytes(model.modules()) == 0 and rows_with_room(0) > MAX_ROUND_ROWS
    assert give_kernels(model)
    row_bytes = row_state_bytes(model.modules())
    recurrent = [each for each in subject_of(model).read(1) if isinstance(each, TapedCache)]
    assert row_bytes == sum(state_arrays(each)[1].nbytes for each in recurrent)
    subject = replace(subject_of(model), row_bytes=row_bytes)
    for rows, expected in ((100, 64), (80, 64), (79, 48), (63, 32), (33, 16), (0, 16)):
        limit = (mx.get_active_memory() + rows * row_bytes + row_bytes // 2) * 16 // 15
        monkeypatch.setattr(mx, "get_memory_limit", lambda limit=limit: limit)
        assert rows_with_room(row_bytes) == rows
        assert rows_with_room(row_bytes, freed=5 * row_bytes) == rows + 5
        assert rows_to_probe(subject) == expected
    monkeypatch.setattr(mx, "get_memory_limit", lambda: 0)
    assert rows_with_room(row_bytes) == 0


def test_a_batch_holds_only_the_states_that_its_last_round_left() -> None:
    """Those before it are freed as it is computed: of a large model they are gigabytes."""
    model, held = taped_qwen(), list[int]()
    assert give_kernels(model)
    subject, positions = subject_of(model), Positions([9] * 4)
    together = left_aligned([subject.read(9)] * 4, positions)
    for kept_rows in ([1, 2, 3, 1], [3, 3, 3, 3], [2, 1, 1, 3], [1, 1, 2, 1]):
        tokens = mx.array([[5, 6, 7]] * 4)
        logits, _ = subject.target.forward_batch(tokens, together)
        positions.advance(kept_rows)
        drop_rejected(together, 3, kept_rows)
        mx.eval(logits, cache_arrays(together))
        del logits
        held.append(mx.get_active_memory())
    assert max(held) - min(held) < row_state_bytes(model.modules())


@pytest.mark.parametrize("k", [15, 19, 31])
def test_requests_keep_different_rows_of_more_than_a_kernel_has_states_of(k: int) -> None:
    """Beside the states of a round before, of which each kept another row."""
    model = taped_qwen()
    assert give_kernels(model)
    assert result_of(batch_identity(subject_of(model), k, sizes=(2, 3), most_rows=64)) == "bitwise"


def test_rounds_of_each_size_and_depth_are_run_before_answers_need_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a round of which requests kept different rows, and behind one of which they did not,
    as far as there is memory."""
    model, stock = taped_qwen(), TapedGatedDelta.few_rows
    assert give_kernels(model)
    shapes = set[tuple[int, int, int]]()

    def noted(self: Any, inputs: mx.array, before: Any, state: mx.array, at: Any) -> Any:
        shapes.add((inputs.shape[0], inputs.shape[1], state.shape[0] if state.ndim == 5 else 0))
        return stock(self, inputs, before, state, at)

    monkeypatch.setattr(TapedGatedDelta, "few_rows", noted)
    _ = result_of(warm_up_batches(subject_of(model), 7, 20))
    expected = {(size, 1, 0) for size in range(2, 17)}
    for rows, most in ((2, 10), (3, 6)):
        for size in range(2, most + 1):
            expected |= {(size, rows, 0), (size, rows, rows), (size, 1, rows)}
    assert {shape for shape in shapes if shape[0] > 1} == expected
