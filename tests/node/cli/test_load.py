"""`exo-node models load` and `unload`, over a stub of the node."""

import json
from pathlib import Path
from typing import Any

import pytest
from api_stub import Stub, as_json, in_process

from exo_node.node.cli import load as module

READY = {"id": "p", "model": "demo", "status": "ready"}
LOADING = {"id": "q", "model": "demo", "status": "loading"}
OTHER = {"id": "r", "model": "other", "status": "ready"}
NO_ROOM = "no other nodes have room for one: demo needs 0.1 GB"


PLACED = {**READY, "context_length": 40960, "reason": "one node holds it", "replicas": 1}


def load(stub: Stub, *arguments: str) -> Any:
    return in_process("models", "load", "--port", str(stub.port), "demo", *arguments)


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ([], {}),
        (["--context", "8192", "--kv-bits", "0"], {"context": 8192, "kv_bits": 0}),
        (["--min-nodes", "2", "--max-nodes", "3"], {"min_nodes": 2, "max_nodes": 3}),
        (["--nodes", "a,b", "--exclude", "c"], {"nodes": ["a", "b"], "exclude": ["c"]}),
        (
            ["--layers", "a:8,b:c:16"],
            {"layers": [{"node": "a", "layers": 8}, {"node": "b:c", "layers": 16}]},
        ),
        (["--drafter", "a/drafter"], {"drafter": "a/drafter"}),
        (["--drafter", "none"], {"drafter": "none"}),
        (["--drafter", "/there/drafter"], {"drafter": "/there/drafter"}),
        (["--drafter", "./drafter"], {"drafter": str(Path.cwd() / "drafter")}),
        (["--replicas", "auto"], {"min_nodes": 1, "replicas": "auto"}),
        (["--replicas", "2"], {"min_nodes": 1, "replicas": 2}),
        (["--replicas", "2", "--min-nodes", "3"], {"min_nodes": 3, "replicas": 2}),
    ],
)
def test_flags_of_a_load_become_the_fields_of_the_api(
    stub: Stub, flags: list[str], fields: dict[str, Any]
) -> None:
    stub.replies["/v1/placements"] = as_json({**PLACED, "data": [READY]})
    result = load(stub, *flags)
    assert result.exit_code == 0, result.output
    assert stub.bodies == [{"model": "demo", **fields}]


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        ([READY, {**READY, "id": "q"}, OTHER], "2 of 2 answer now"),
        ([READY, LOADING, OTHER], f"1 of 2 answer now; {NO_ROOM}"),
    ],
)
def test_a_load_says_the_context_the_reason_and_how_many_copies_answer(
    stub: Stub, placements: object, text: str
) -> None:
    missing = {"replicas_missing": NO_ROOM, "data": placements}
    stub.replies["/v1/placements"] = as_json({**PLACED, "kv_bits": 8, "replicas": 2, **missing})
    assert " ".join(load(stub, "--replicas", "2").output.split()) == (
        "demo is loaded, with 40960 tokens of context, caches of 8 bits: one node holds it "
        f"demo: {text}"
    )


def test_json_of_a_load_is_the_placement(stub: Stub) -> None:
    stub.replies["/v1/placements"] = as_json(PLACED)
    assert json.loads(load(stub, "--json").stdout) == PLACED


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--layers", "a=8"], "'layers' has 'a=8'; write node:number"),
        (["--layers", ""], "'layers' has ''; write node:number"),
        *(
            (["--replicas", n], f"'{n}' is no number from 1 to 8")
            for n in ("0", "9", "two", "", "²")
        ),
        (["--context", "0"], "greater than or equal to 1"),
    ],
)
def test_wrong_options_of_a_load_are_refused_before_anything_is_sent(
    stub: Stub, flags: list[str], words: str
) -> None:
    result = load(stub, *flags)
    assert result.exit_code in (1, 2)
    assert words in " ".join(result.output.split())
    assert stub.bodies == []


def test_what_the_node_refuses_is_the_error_of_a_load(stub: Stub) -> None:
    refusal = {"message": "no model 'demo' is on this machine", "code": "model_not_found"}
    stub.replies["/v1/placements"] = as_json({"error": refusal}, 404)
    result = load(stub, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert json.loads(result.stderr)["error"] == refusal


def test_an_interrupted_load_says_that_the_node_still_loads(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "call", interrupted)
    result = load(stub)
    assert result.exit_code == 130
    assert "`exo-node models unload demo` ends that" in " ".join(result.output.split())


def test_a_loaded_model_is_unloaded_by_its_name_and_another_one_is_refused(stub: Stub) -> None:
    loaded = [{"id": "p0", "model": "demo"}, {"id": "p 1", "model": "owner/large"}]
    stub.replies["/v1/placements"] = as_json({"data": loaded})
    stub.replies["/v1/placements/p%201"] = as_json(b"")
    words = ("models", "unload", "--port", str(stub.port))
    result = in_process(*words, "owner/large")
    assert (result.exit_code, stub.deleted) == (0, ["/v1/placements/p%201"]), result.output
    refused = in_process(*words, "another")
    assert refused.exit_code != 0
    assert "another is not loaded; demo, owner/large now" in refused.output
    assert len(stub.deleted) == 1
