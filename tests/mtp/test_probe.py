"""The probe tells a backend whose numbers depend on the number of rows from one where they do not.

The shims for such backends perturb linear layers, cache writes included.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import KVCache
from shims import at_rows, by_rows, perturb
from tiny import VOCABULARY, taped_qwen

from exo_node.mtp.caches.rollback import TapedCache, with_tapes
from exo_node.mtp.families.qwen35 import Qwen35Family
from exo_node.mtp.pieces import result_of
from exo_node.mtp.probe import (
    LONGEST_PROBED,
    PROMPT_ROWS,
    Identity,
    Subject,
    greedy_identity,
)
from exo_node.mtp.seams import ForwardOutput, Want
from exo_node.mtp.targets import FamilyTarget

Change = Callable[[ForwardOutput, mx.array, Sequence[Any]], ForwardOutput]
"""Changes the output of a forward, given its ids and caches."""


class ChangedTarget(FamilyTarget):
    """A target whose forwards of one request are changed after the computation."""

    def __init__(self, model: qwen3_5.Model, change: Change | None) -> None:
        super().__init__(Qwen35Family(model))
        self._change = change

    def forward(
        self,
        tokens: mx.array,
        caches: Sequence[Any],
        *,
        want: Want,
        embeddings: mx.array | None = None,
    ) -> ForwardOutput:
        block = super().forward(tokens, caches, want=want, embeddings=embeddings)
        return block if self._change is None else self._change(block, tokens, caches)


def subject_of(
    model: qwen3_5.Model, change: Change | None = None, context: int = LONGEST_PROBED
) -> Subject:
    def make_caches() -> list[Any]:
        return with_tapes(model.make_cache())

    return Subject(ChangedTarget(model, change), make_caches, VOCABULARY, context, lambda: 0.0)


def probe(model: qwen3_5.Model, k: int, change: Change | None = None) -> Identity:
    return result_of(greedy_identity(subject_of(model, change), k))


@pytest.mark.parametrize(
    ("model_kind", "k"),
    [
        ({"dtype": "float32"}, 1),
        ({"dtype": "float32"}, 2),
        *((kind, 3) for kind in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "bits": 4})),
        ({"moe": True}, 3),
    ],
    ids=str,
)
def test_the_cpu_is_bitwise(model_kind: dict[str, Any], k: int) -> None:
    assert probe(taped_qwen(**model_kind), k) == "bitwise"


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("only", ["", "v_proj", "in_proj_qkv", "lm_head", "layers.0.mlp"])
def test_numbers_that_depend_on_the_row_count_are_near_tie(k: int, only: str) -> None:
    model = taped_qwen()
    assert perturb(model, by_rows, only=only)
    assert probe(model, k) == "near_tie"


@pytest.mark.parametrize(
    ("behind", "context_length", "identity"),
    [
        (1000, 8192, "near_tie"),
        (4000, 8192, "near_tie"),
        (5000, 8192, "bitwise"),
        (4000, 4096, "bitwise"),
        (1000, 1024, "bitwise"),
        (20, 64, "near_tie"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_contexts_are_measured_as_far_as_the_placement_has_them(
    behind: int, context_length: int, identity: Identity, dtype: str
) -> None:
    """Attention on GPUs changes its kernels with the length of the context."""

    def change(block: ForwardOutput, tokens: mx.array, caches: Sequence[Any]) -> ForwardOutput:
        rows = tokens.shape[0]
        position = max(cache.offset for cache in caches if isinstance(cache, KVCache)) - rows
        if position < behind or rows == 1:
            return block
        return ForwardOutput(block.logits * 1.01, block.hidden)

    subject = subject_of(taped_qwen(dtype), change, context_length)
    assert result_of(greedy_identity(subject, 2)) == identity


def test_a_kernel_that_is_chosen_by_the_size_of_a_buffer_is_near_tie() -> None:
    """MLX on CUDA takes cuDNN where the keys lie in a buffer of a multiple of 256 rows."""

    def change(block: ForwardOutput, tokens: mx.array, caches: Sequence[Any]) -> ForwardOutput:
        del tokens
        long_caches = [c for c in caches if isinstance(c, KVCache) and c.offset >= 256]
        if any(c.keys is not None and c.keys.shape[2] % 256 == 0 for c in long_caches):
            return ForwardOutput(block.logits * 1.01, block.hidden)
        return block

    assert probe(taped_qwen(), 2, change) == "near_tie"


def test_a_router_that_depends_on_the_row_count_is_near_tie() -> None:
    """In a mixture of experts the router flips first."""
    model = taped_qwen(moe=True)
    assert perturb(model, by_rows, only=".mlp.gate") == 4
    assert probe(model, 2) == "near_tie"


@pytest.mark.parametrize("width", [2, 3, 4])
def test_every_width_up_to_the_largest_is_measured(width: int) -> None:
    """One kernel for two rows and another for four would pass a probe of four rows alone."""
    model = taped_qwen()
    _ = perturb(model, at_rows([width]))
    assert probe(model, 3) == "near_tie"
    assert probe(model, width - 2) == "bitwise"


def test_the_prompts_row_count_does_not_matter() -> None:
    model = taped_qwen()
    _ = perturb(model, at_rows([PROMPT_ROWS]))
    assert probe(model, 3) == "bitwise"


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind", [KVCache, TapedCache])
def test_a_block_that_only_writes_other_rows_into_a_cache_is_near_tie(kind: type, k: int) -> None:

    def change(block: ForwardOutput, tokens: mx.array, caches: Sequence[Any]) -> ForwardOutput:
        if 1 < tokens.shape[0] < PROMPT_ROWS:
            for cache in caches:
                if isinstance(cache, kind):
                    nudge(cache)
        return block

    assert probe(taped_qwen(), k, change) == "near_tie"


def nudge(cache: KVCache | TapedCache) -> None:
    """Simulates that a block's rows are computed by another kernel than single ones."""
    if isinstance(cache, KVCache):
        assert cache.values is not None
        cache.values = cache.values * 1.001
        return
    restore = cache.rollback

    def rollback(rows: int) -> None:
        restore(rows)
        cache[1] = cache[1] * 1.001

    cache.rollback = rollback
