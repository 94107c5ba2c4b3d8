"""A real runner whose MLX computes as on a chip of Apple's: drafts change no token."""

import asyncio
import sys
from pathlib import Path

import pytest
from chip_runner import chip_python
from chips import COARSE, M3_MAX
from readers import prompt
from runners import running
from small import LAYERS, small_checkpoint

from exo_node.shard.kernels import row_groups

TOKENS = 32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_answers_with_drafts_are_those_without(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", chip_python(tmp_path, M3_MAX.name, COARSE))
    fields = {"native_mtp": True, "dtype": dtype, "context_length": 1000}
    own = str(tmp_path / "profiles")  # what is measured on a chip is of no use to other tests
    async with running((0, LAYERS), small_checkpoint(), profile_folder=own, **fields) as placement:
        plain = [await placement.answer(prompt(i), max_tokens=TOKENS) for i in range(3)]
        drafted = await asyncio.gather(
            *(
                placement.answer(
                    prompt(i), max_tokens=TOKENS, num_draft_tokens=3, drafting_reason=""
                )
                for i in range(3)
            )
        )
    assert [each.ids for each in drafted] == [each.ids for each in plain]
    for each in drafted:
        assert each.finished is not None
        stats = each.finished.stats
        assert row_groups.NAME in stats.kernels and sum(r.accepted for r in each.rounds) > 0
        assert stats.greedy_identity == "bitwise"
        assert not stats.batched_tokens or stats.batch_identity == "bitwise"
