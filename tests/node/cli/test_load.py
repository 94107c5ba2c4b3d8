"""`exo-node replicas`, over a stub of the node."""

import json

import pytest
from api_stub import Stub, as_json, in_process

READY = {"id": "p", "model": "demo", "status": "ready"}
LOADING = {"id": "q", "model": "demo", "status": "loading"}
OTHER = {"id": "r", "model": "other", "status": "ready"}
NO_ROOM = "no other nodes have room for one: demo needs 0.1 GB"


@pytest.mark.parametrize(
    ("count", "sent", "desired", "placements", "missing", "text"),
    [
        ("2", 2, 2, [READY, {**READY, "id": "q"}, OTHER], None, "demo: 2 of 2 answer now"),
        ("2", 2, 2, [READY, OTHER], NO_ROOM, f"demo: 1 of 2 answer now; {NO_ROOM}"),
        ("3", 3, 3, [READY, LOADING], "the next one is about to be loaded", "1 of 3 answer now"),
        ("auto", "auto", 1, [READY], None, "demo: 1 answer now; others follow when answers share"),
    ],
)
def test_the_number_is_sent_and_what_became_of_it_is_said(
    stub: Stub, count: str, sent: object, desired: int, placements: object, missing: str, text: str
) -> None:
    reply = {**READY, "replicas": desired, "replicas_missing": missing, "data": placements}
    stub.replies["/v1/placements"] = as_json(reply)
    result = in_process("replicas", "--port", str(stub.port), "demo", count)
    assert result.exit_code == 0, result.output
    assert stub.bodies == [{"model": "demo", "replicas": sent}]
    assert text in " ".join(result.output.split())


def test_json_has_the_copies_of_that_model(stub: Stub) -> None:
    reply = {**READY, "replicas": 2, "data": [READY, LOADING, OTHER]}
    stub.replies["/v1/placements"] = as_json(reply)
    result = in_process("replicas", "--json", "--port", str(stub.port), "demo", "2")
    printed = json.loads(result.stdout)
    assert (printed["ready"], [each["id"] for each in printed["placements"]]) == (1, ["p", "q"])


@pytest.mark.parametrize("count", ["0", "9", "-1", "two", "", "²"])
def test_another_number_is_refused_before_anything_is_sent(stub: Stub, count: str) -> None:
    result = in_process("replicas", "--port", str(stub.port), "demo", "--", count)
    assert result.exit_code == 2
    assert "no number from 1 to 8, nor auto" in " ".join(result.output.split())
    assert stub.bodies == []
