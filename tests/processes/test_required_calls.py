"""Tool calls that a request requires, through official clients.

The models are random, one with a template without tools and one that writes calls in tags, and the
demo.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from enum import StrEnum
from typing import Annotated, Any, Literal

import openai
import pytest
from families_text import folder_of
from models import make_checkpoint
from nodes import Node, node
from openai import OpenAI
from pydantic import BaseModel, Field

ASK: list[Any] = [{"role": "user", "content": "How is the weather in Ulm?"}]


class Unit(StrEnum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


class Town(BaseModel, extra="forbid"):
    kind: Literal["town"]
    name: Annotated[str, Field(max_length=6, pattern="^[A-Z][a-z]*$")]


class Place(BaseModel, extra="forbid"):
    kind: Literal["place"]
    row: int = Field(ge=0, le=9)


class Weather(BaseModel, extra="forbid"):
    """The weather somewhere."""

    where: Annotated[Town | Place, Field(discriminator="kind")]
    unit: Unit
    day: Literal["today", "tomorrow"] | None
    note: Annotated[str, Field(max_length=5)] | None
    hours: int | None = Field(ge=0, le=9)


class Now(BaseModel, extra="forbid"):
    """The time."""

    zone: Literal["local", "utc"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("calls")
    models = folder / "models"
    # The demo's template comes with a vocabulary of 4096.
    _ = make_checkpoint(models / "plain", "qwen3_5", dtype="float32", vocab=4096, raw=False, seed=7)
    tagged = make_checkpoint(
        models / "tagged", "qwen3_5", dtype="float32", vocab=4112, raw=False, seed=7
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        _ = shutil.copy(folder_of("qwen") / name, tagged / name)
    flags = ("--no-mdns", "--dtype", "float32", "--models-dir", str(models))
    with node(folder, *flags) as running:
        yield running


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Closes the official clients at the end of the test."""
    with ExitStack() as stack:
        yield stack


def client_of(served: Node, closing: ExitStack) -> Any:
    base = f"http://127.0.0.1:{served.port}/v1"
    return closing.enter_context(OpenAI(base_url=base, api_key="any", max_retries=0))


SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 3}


@pytest.fixture(params=("plain", "tagged"))
def wish(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The fields of a request, with thinking off: a random model never ends its thoughts."""
    switch = {"chat_template_kwargs": {"enable_thinking": False}}
    extra = switch if request.param == "tagged" else {}
    return {"model": request.param, "messages": ASK, "extra_body": extra, **SAMPLED}


def test_openais_parse_returns_instances_of_its_tools_models(
    served: Node, closing: ExitStack, wish: dict[str, Any]
) -> None:
    client = client_of(served, closing)
    tools = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Now)]
    named = {"type": "function", "function": {"name": "Weather"}}
    for choice in ("required", named):
        whole = client.chat.completions.parse(
            **wish, tools=tools, tool_choice=choice, parallel_tool_calls=False
        ).choices[0]
        assert whole.finish_reason == "tool_calls"
        [call] = whole.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather | Now)
        assert choice == "required" or isinstance(call.function.parsed_arguments, Weather)


def test_the_demo_calls_and_continues_after_the_result(served: Node, closing: ExitStack) -> None:
    client = client_of(served, closing)
    tool = {"type": "function", "function": {"name": "Now", "parameters": Now.model_json_schema()}}
    fields: dict[str, Any] = {"model": "demo", "tools": [tool], **SAMPLED}
    first = client.chat.completions.create(messages=ASK, tool_choice="required", **fields)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noon"}
    chat = [*ASK, message.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(messages=chat, max_tokens=4, **fields)
    assert second.choices[0].message.content
