"""`bench/prefix_tiers.py` notices second turns that differ from the cold one, or from its tier."""

from dataclasses import replace
from typing import Any

import pytest
from prefix_tiers import Measurement, faults_of

COLD = Measurement("second, cold", 0, 9.0, 300, 0, "", (1, 2), (-0.5, -0.25))
MEMORY = replace(COLD, arm="memory", first_s=0.2, cached_rows=280, tier="memory")
DISK = replace(MEMORY, arm="disk", tier="disk")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"ids": (1, 3)}, ["disk 0: another answer than the cold one"]),
        ({"logprobs": (-0.5, -0.125)}, ["disk 0: another answer than the cold one"]),
        ({"tier": "memory"}, ["disk 0: answered from memory"]),
        ({"tier": ""}, ["disk 0: answered from no cache"]),
    ],
)
def test_faults(changes: dict[str, Any], expected: list[str]) -> None:
    other = replace(COLD, repeat=1, ids=(7,), logprobs=(-3.0,))
    disk = replace(DISK, **changes)
    assert faults_of([COLD, MEMORY, disk, other, replace(COLD, arm="cold", ids=(9,))]) == expected
