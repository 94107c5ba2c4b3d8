"""A request as a runner gets it: what belongs to its choice, and what is left to the model."""

import pytest

from exo_node.mtp.types import Sampling
from exo_node.node.chat.requests import GenerationRequest
from exo_node.node.chat.wire import to_wire
from exo_node.placement.ids import ModelId, RequestId
from exo_node.proto import peer_pb2 as pb


def wire(choice: int = 0, seed: int | None = None) -> pb.GenerateRequest:
    request = GenerationRequest(
        RequestId("r"), ModelId("m"), (), Sampling(seed=seed), choice=choice, text="a"
    )
    return to_wire(request, pb.Placed())


@pytest.mark.parametrize(
    ("seed", "choice", "expected"), [(5, 0, 5), (5, 3, 8), (2**64 - 1, 2, 1), (0, 7, 7)]
)
def test_a_choice_has_the_seed_plus_its_number(seed: int, choice: int, expected: int) -> None:
    assert wire(choice, seed).sampling.seed == expected


def test_a_choice_without_a_seed_has_none() -> None:
    assert not wire(3).sampling.HasField("seed")


def test_what_only_completions_ask_for_is_absent_elsewhere() -> None:
    request = wire()
    assert not (request.HasField("suffix") or request.prompt_logprobs or request.choice_of)
