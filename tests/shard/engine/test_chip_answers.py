"""Answers across every border of a chip's attention have the ids and log-probabilities of K = 0
alone: drafts, copies, neighbours, resumes, cached prefixes and stages change none of them."""

from pathlib import Path
from typing import Any

import pytest
from chip_answers import HELD_BACK, Served, checkpoint_of, differing
from chips import M1, M3, M3_MAX, M5, Chip, on_chip

from exo_node.shard.kernels import install, row_sets
from exo_node.shard.kernels.trial import KernelChoice

PLACES = [
    (M3_MAX, "8 heads", "4 bits", 8186),
    (M3_MAX, "2 heads for each key head", "mxfp4", 1018),
    (M3, "a mixture", "mxfp4", 4090),
    (M1, "windows", "4 bits", 4090),
    (M5, "latent attention", "4 bits", 4090),
    (HELD_BACK, "6 heads", "4 bits", 327),
    (HELD_BACK, "4 heads", "bfloat16", 1771),
]
"""Chip, shape, precision, and rows of prompts, a few before a border."""


def _name(place: tuple[Chip, str, str, int]) -> str:
    return ", ".join(str(each) for each in (place[0].name, *place[1:]))


@pytest.mark.parametrize("place", PLACES, ids=_name)
def test_nothing_differs_from_k_0_alone(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any(_differing(place, tmp_path, monkeypatch).values())


@pytest.mark.parametrize("place", [PLACES[2], PLACES[5]], ids=_name)
def test_with_attention_at_once_drafts_differ(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_choice(*_: object) -> tuple[KernelChoice, ...]:
        return ()

    monkeypatch.setattr(install, "group_keys", no_choice)
    assert any(_differing(place, tmp_path, monkeypatch).values())


def _differing(place: Any, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many log-probabilities differ, by how the answer was made."""
    chip, shape, precision, rows = place
    patch.setattr(row_sets, "VALUES", 64)  # a coarse deviation shows in each
    with on_chip(chip):
        served = Served(checkpoint_of(folder, shape), precision, rows)
        return {each[0]: max(differing(each)) for each in served.answers(1)}
