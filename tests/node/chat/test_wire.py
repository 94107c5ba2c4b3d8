"""A request as a runner gets it: what belongs to its choice, and what is left to the model."""

import pytest

from exo_node.mtp.types import Sampling
from exo_node.node.chat.requests import GenerationRequest
from exo_node.node.chat.wire import sources_of, to_wire
from exo_node.placement.ids import ModelId, RequestId
from exo_node.placement.sampling_values import API_DEFAULTS
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
    assert not (request.HasField("suffix") or request.output.prompt_logprobs)


# ------------------------------------------- the model's sampling, and where each value comes from

MODEL = pb.Placed(
    sampling={"temperature": 0.6, "top_k": 20.0},
    stages=[
        pb.PlacedStage(
            ready=pb.LoadReady(
                published_sampling={
                    "temperature": 0.2,
                    "top_k": 5.0,
                    "top_p": 0.8,
                    "repetition_penalty": 1.05,
                }
            )
        )
    ],
)


def call(explicit: Sampling | None = None, *names: str, of_profile: str = "") -> GenerationRequest:
    return GenerationRequest(
        RequestId("r"),
        ModelId("m"),
        (),
        explicit or Sampling(temperature=1.0),
        text="a",
        explicit_fields=frozenset(names),
        profile_fields=frozenset(of_profile.split()),
    )


def test_the_card_wins_over_the_publisher_and_both_over_the_default() -> None:
    request = call()
    assert {name: (v["value"], v["source"]) for name, v in sources_of(request, MODEL).items()} == {
        "temperature": (0.6, "card"),
        "top_p": (0.8, "generation_config.json"),
        "top_k": (20, "card"),
        "min_p": (0.0, "default"),
        "repetition_penalty": (1.05, "generation_config.json"),
    }
    sampling = to_wire(request, MODEL).sampling
    values = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty)
    assert values == (0.6, 0.8, 20, 1.05)


def test_what_the_request_or_its_profile_sets_wins() -> None:
    own = Sampling(temperature=0.0, top_p=0.5, seed=7, repetition_penalty=1.0)
    names = ("temperature", "top_p", "seed", "repetition_penalty", "logit_bias")
    request = call(own, *names, of_profile="top_p repetition_penalty")
    values = {name: (v["value"], v["source"]) for name, v in sources_of(request, MODEL).items()}
    assert values == {
        "temperature": (0.0, "request"),
        "top_p": (0.5, "profile"),
        "top_k": (20, "card"),
        "min_p": (0.0, "default"),
        "repetition_penalty": (1.0, "profile"),
        "seed": (7, "request"),
    }
    sampling = to_wire(request, MODEL).sampling
    values = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty)
    assert values == (0.0, 0.5, 20, 1.0)


def test_a_model_without_suggestions_keeps_the_request_as_it_is() -> None:
    sampling = to_wire(call(Sampling(temperature=0.3, top_k=2)), pb.Placed()).sampling
    assert (sampling.temperature, sampling.top_k) == (pytest.approx(0.3), 2)


@pytest.mark.parametrize("name", API_DEFAULTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e18])
def test_values_of_a_peer_that_are_out_of_bounds_count_as_absent(name: str, value: float) -> None:
    ready = pb.LoadReady(published_sampling={name: value})
    placed = pb.Placed(sampling={name: value}, stages=[pb.PlacedStage(ready=ready)])
    assert sources_of(call(), placed)[name]["source"] == "default"
    assert to_wire(call(), placed) == to_wire(call(), pb.Placed(stages=placed.stages))
