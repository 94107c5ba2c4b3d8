"""The OpenAPI document: fresh, true of what each field does, and nothing that it allows breaks."""

import importlib.util
import json
import re
import runpy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fuzzing import fuzz
from http_node import Node

from exo_node.node.api.http.bodies import StrictBody, TolerantBody, parse_body
from exo_node.node.api.ollama.ollama_schema import OllamaGenerateBody
from exo_node.node.api.openai.completions_schema import DetokenizeBody
from exo_node.node.api.operations.plan_request import PlanBody
from exo_node.node.join.handshake import parse_code
from exo_node.placement.errors import InvalidRequest
from exo_node.placement.ids import RequestId

DOCS = Path(__file__).parents[3] / "docs"
NEEDS_SCHEMATHESIS = pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed"
)


GENERATOR: Mapping[str, Any] = runpy.run_path(str(DOCS / "generate.py"))
BODIES: Mapping[tuple[str, str], type[StrictBody]] = GENERATOR["bodies"](GENERATOR["routes"]())


def test_the_document_the_table_of_fields_and_the_pages_recipes_are_fresh() -> None:
    due = "run `python docs/generate.py`"
    assert (DOCS / "openapi.json").read_text() == GENERATOR["openapi"](), due
    page = (DOCS / "api.md").read_text()
    assert page == GENERATOR["with_table"](page), due
    assert GENERATOR["CLIENTS"].read_text() == (DOCS / "clients.md").read_text(), due
    assert page.count(GENERATOR["BEGIN"]) == page.count(GENERATOR["END"]) == 1


def test_it_is_a_document() -> None:
    document = json.loads((DOCS / "openapi.json").read_text())
    assert document["openapi"].startswith("3.1")
    assert {"/v1/chat/completions", "/api/chat", "/v1/messages"} <= document["paths"].keys()
    schemas = document["components"]["schemas"]
    for name in {body.__name__ for body in BODIES.values()}:
        jsonschema.Draft202012Validator.check_schema({**schemas[name], "$defs": {}})


BASE: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}], "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
}
SAMPLES: Mapping[str, Any] = {
    "metadata": {"a": "b"},
    "store": True,
    "cache_prompt": True,
    "include": ["reasoning.encrypted_content"],
    "truncation": "auto",
    "background": True,
    "conversation": "c",
    "suffix": "x",
}
"""Samples for fields that are no plain text."""


def fields(effect: str) -> list[tuple[str, str]]:
    return [
        (path, name)
        for path in BASE
        for name, own in GENERATOR["effects"](BODIES["POST", path]).items()
        if own == effect
    ]


@pytest.mark.parametrize(("path", "name"), fields("no-op"))
def test_a_field_without_effect_changes_nothing(node: Node, path: str, name: str) -> None:
    node.chat.reset()
    for extra in ({}, {name: SAMPLES.get(name, "x")}):
        reply = node.ask("POST", path, {"model": "demo", **BASE[path], **extra})
        assert reply.status == 200, reply.body
        assert "x-exo-node-ignored" not in reply.headers
    plain, extended = (replace(each, id=RequestId("r")) for each in node.chat.requests)
    assert plain == extended


@pytest.mark.parametrize(("path", "name"), fields("ignored"))
def test_an_ignored_field_changes_nothing_and_is_named(node: Node, path: str, name: str) -> None:
    node.chat.reset()
    for extra, header in (({}, None), ({name: {"any": "thing"}}, name)):
        reply = node.ask("POST", path, {"model": "demo", **BASE[path], **extra})
        assert (reply.status, reply.headers.get("x-exo-node-ignored")) == (200, header)
    plain, extended = (replace(each, id=RequestId("r")) for each in node.chat.requests)
    assert plain == extended


@pytest.mark.parametrize(("path", "name"), fields("refused"))
def test_a_refused_field_is_named_and_its_neutral_values_are_taken(
    node: Node, path: str, name: str
) -> None:
    body = {"model": "demo", **BASE[path]}
    refused = node.ask("POST", path, {**body, name: SAMPLES.get(name, {"no": "thing"})})
    assert refused.status == 400, refused.body
    assert name in str(refused.json["error"])
    neutral = BODIES["POST", path].refused_fields[name]
    for value in (None, *neutral):
        assert node.ask("POST", path, {**body, name: value}).status == 200, value


@pytest.mark.parametrize("path", BASE)
def test_what_no_schema_names_is_refused_or_named(node: Node, path: str) -> None:
    body: type[StrictBody] = BODIES["POST", path]
    reply = node.ask("POST", path, {"model": "demo", **BASE[path], "made_up": 1})
    if issubclass(body, TolerantBody):
        assert (reply.status, reply.headers["x-exo-node-ignored"]) == (200, "made_up")
    else:
        assert (reply.status, reply.error["param"]) == (400, "made_up")


@NEEDS_SCHEMATHESIS
def test_what_the_document_allows_breaks_nothing_and_a_seeded_fault_is_found(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few requests; `bench/api_fuzz.py` sends thousands."""
    node.chat.reset()
    document = json.loads((DOCS / "openapi.json").read_text())
    base, paths = f"http://127.0.0.1:{node.port}", ("/api/generate", "/v1/settings")
    report = fuzz(document, base, {}, examples=4, paths=paths)
    assert report.faults == []
    assert report.requests > 10

    def breaks(self: OllamaGenerateBody) -> None:
        raise ZeroDivisionError("seeded")

    monkeypatch.setattr(OllamaGenerateBody, "check", breaks)
    seeded = fuzz(document, base, {}, examples=2, paths=paths[:1])
    assert any("500" in fault for fault in seeded.faults)


def test_an_integer_that_is_written_as_a_fraction_is_one_as_in_the_document() -> None:
    body = parse_body(b'{"model":"m","tokens":[5.0,6]}', DetokenizeBody)
    assert body.tokens == [5, 6]
    for wrong in (b"5.5", b"true", b'"5"', b"-1.0", b"1e300"):
        with pytest.raises(InvalidRequest, match="tokens"):
            _ = parse_body(b'{"model":"m","tokens":[' + wrong + b"]}", DetokenizeBody)


CODES = {
    "123456": True,
    "123 456": True,
    "12-34-56": True,
    "123456789012345": False,
    "12345": False,
}


def test_the_document_has_the_bounds_of_digits_settings_and_queries() -> None:
    document = json.loads((DOCS / "openapi.json").read_text())
    schemas = document["components"]["schemas"]
    pattern = schemas["ApproveBody"]["properties"]["code"]["pattern"]
    for code, good in CODES.items():
        assert bool(re.search(pattern, code)) == good == (parse_code(code) is not None), code
    assert schemas["SettingsBody"]["minProperties"] == 1
    preview = document["paths"]["/v1/placements/preview"]["get"]["parameters"]
    bounds = {each["name"]: each["schema"].get("minimum") for each in preview}
    assert bounds.keys() == PlanBody.model_fields.keys()
    numbers = {name: least for name, least in bounds.items() if least is not None}
    assert numbers == {"min_nodes": 1, "max_nodes": 1, "context": 1}
    events = document["paths"]["/v1/events"]["get"]["parameters"]
    assert {each["name"] for each in events} == {"after", "limit", "follow", "scope"}
