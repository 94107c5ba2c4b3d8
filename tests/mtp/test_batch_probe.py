"""The probe tells a backend that computes a request otherwise in a batch from one that does not."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache
from shims import by_rows, perturb
from tiny import VOCABULARY, taped_qwen

from exo_node.mtp.batch_probe import batch_identity, same_prompts
from exo_node.mtp.caches.positions import Positions
from exo_node.mtp.caches.rollback import with_tapes
from exo_node.mtp.families.qwen35 import Qwen35Family
from exo_node.mtp.pieces import result_of
from exo_node.mtp.probe import Subject
from exo_node.mtp.targets import FamilyTarget


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
