"""The verdict on greedy answers that differ: a near tie explains its own difference only."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from exo_node.mtp.types import Forward, Round, TokenLogprobs
from exo_node.shard.tools.verify import answers
from exo_node.shard.tools.verify.answers import NEAR_TIE_MARGIN, check_greedy
from exo_node.shard.tools.verify.subject import ModelUnderTest

TAU = 0.25
NEAR, FAR = NEAR_TIE_MARGIN * TAU / 2, NEAR_TIE_MARGIN * TAU * 2
"""Gaps between the two most likely tokens: rounding may turn over one, not the other."""


CANNED: Any = SimpleNamespace()
"""Answers need neither a target nor a draft head."""
SUBJECT = ModelUnderTest(CANNED, list, 8, mx.float32, chunk=8, max_k=1, draft_model=CANNED)


@pytest.mark.parametrize(
    ("gaps", "bitwise", "finding"),
    [
        ([NEAR, NEAR], False, "differs"),
        ([NEAR, FAR], False, "defect"),
        ([FAR, NEAR], False, "defect"),
        ([NEAR, NEAR], True, "defect"),
    ],
)
def test_one_difference_at_a_near_tie_does_not_excuse_another(
    gaps: list[float], bitwise: bool, finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def canned(
        _: object, prompt: Sequence[int], k: int, tokens: int, *, top: int | None = None
    ) -> tuple[Round, ...]:
        """Prompt [n] has the answer 1 without drafts and 2 with them, at the n-th gap."""
        best = TokenLogprobs(1, 0.0, ((1, 0.0), (2, -gaps[prompt[0]])))
        return (Round((2 if k else 1,), k, 0, Forward(0, 1), (best,)),)

    monkeypatch.setattr(answers, "answer", canned)
    check = check_greedy(SUBJECT, [[n] for n in range(len(gaps))], 1, TAU, bitwise=bitwise)
    assert check.finding == finding
