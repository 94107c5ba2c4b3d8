"""A batch stops at each member's end, and offers rows for reuse only where they are sound.

The target counts upwards and has no layers, so no caches.
"""

from collections.abc import Sequence

import mlx.core as mx
import pytest
from tables import EndAt

from exo_node.mtp.answer import Answer
from exo_node.mtp.batch import Batch, Held, Member
from exo_node.mtp.depth import FixedDepth
from exo_node.mtp.sampler import Sampler
from exo_node.mtp.types import Sampling

VOCABULARY = 32
ROWS = 3
"""Of each request's prompt."""


class Counting:
    """A `BatchTarget` that predicts the id after that of each token."""

    def __init__(self, fails_at: int = 1_000_000) -> None:
        """`fails_at`: the number of the forward that raises, from 1."""
        self._fails_at = fails_at
        self._forwards = 0

    def forward_batch(
        self, tokens: mx.array, caches: Sequence[object]
    ) -> tuple[mx.array, mx.array | None]:
        self._forwards += 1
        if self._forwards == self._fails_at:
            raise RuntimeError("the device is gone")
        return mx.eye(VOCABULARY)[tokens + 1], None


def joined(batch: Batch, *, budget: int = 100, end: int = 100) -> tuple[Member, EndAt]:
    """A member whose last token is 0, and its ending, which keeps the tokens that follow."""
    ending = EndAt(end)
    answer = Answer(budget, None, Sampler(Sampling(), 0), ending)
    member = Member(answer, FixedDepth(0), None, 0)
    batch.join(member, Held([], ROWS))
    return member, ending


def in_turn(batch: Batch, *members: Member, rounds: int) -> list[tuple[int, ...]]:
    """The tokens of the next rounds, which the members take one after the other."""
    return [batch.take(member).tokens for _ in range(rounds) for member in members]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("ends", [{"budget": 3}, {"end": 3}], ids=["length", "stop"])
def test_a_member_that_ended_receives_no_token_of_later_rounds(
    ends: dict[str, int], ahead: bool
) -> None:
    """Its next token is being computed when it ends, and it is dropped only later."""
    batch = Batch(Counting(), None, lambda: 0.0, ahead)
    (ended, ending), (other, _) = joined(batch, **ends), joined(batch)
    assert in_turn(batch, ended, other, rounds=3) == [(1,), (1,), (2,), (2,), (3,), (3,)]
    reason = ended.reason
    assert reason == ("length" if "budget" in ends else "stop")
    assert in_turn(batch, other, rounds=2) == [(4,), (5,)]
    assert (ending.pushed, list(ended.rounds), ended.reason) == ([1, 2, 3], [], reason)
