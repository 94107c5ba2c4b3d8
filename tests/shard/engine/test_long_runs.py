"""Memory does not grow over long answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import ORACLE, whole_engine
from long_runs import (
    Memory,
    growth,
    kept_after_clearing,
    memory_over,
)
from models import make_checkpoint

from exo_node.shard.engine.answers.text_engine import TextEngine

PROMPT: list[int] = ORACLE[0]["prompt_ids"]
TOKENS = 260
"""Tokens of the tiny model: its caches grow once, from 256 rows on."""
CLEAR_EVERY = 64
"""Rounds between two moments at which buffers are freed, a fourth of the product's: with TOKENS
there are three whole stretches of them."""
ROWS = 330
"""Rows of the prompt before those tokens: buffers pile up where caches are long."""
LAYERS = 4
GROWTH = 130_000
"""Bytes; a row of logits is 16,384 of them, so a leak of one a round is many times as much."""
KEPT = 1_000_000
"""Bytes; where buffers are freed at most 430,000 are kept, elsewhere 1,360,000 and more."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextEngine]:
    """A random model and head, with the demo's vocabulary and tokenizer."""
    folder = make_checkpoint(
        Path(tmp_path_factory.mktemp("long")) / "m", "qwen3_5", dtype="float32", vocab=4096
    )
    yield whole_engine(folder, end_layer=LAYERS, num_layers=LAYERS)


def sampled(engine: TextEngine, k: int) -> list[Memory]:
    return memory_over(engine, (PROMPT * ROWS)[:ROWS], k, TOKENS, every=10)


@pytest.mark.parametrize("k", [0, 2])
def test_memory_does_not_grow_with_the_answer(
    tiny: TextEngine, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """`bench/long_run.py` runs 10,000 tokens, and clears as seldom as the product does."""
    monkeypatch.setattr("exo_node.shard.engine.engine.CLEAR_EVERY", CLEAR_EVERY)
    samples = sampled(tiny, k)
    assert growth(samples) < GROWTH
    assert kept_after_clearing(samples, CLEAR_EVERY) < KEPT
