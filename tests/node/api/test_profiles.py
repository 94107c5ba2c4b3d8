"""Names of a person's own for models: read from a file, used in every dialect, listed."""

import asyncio
import os
from collections.abc import AsyncGenerator, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes import ANSWER, FakeChat, FakeOperations, says
from http_node import BODIES, Node, Reply, chat_body, no_files, serving_fakes
from starlette.types import ASGIApp

from exo_node.node.api.forward import HeadForwarder, answer_forwarded
from exo_node.node.api.server import Services, build_app
from exo_node.node.api.shared.profile_file import ProfileFile
from exo_node.node.machine.timing import LOCAL
from exo_node.node.trust.local_token import TOKEN_HEADER, LocalToken
from exo_node.placement.ids import NodeId
from exo_node.proto import peer_pb2 as pb

TOML = """
"gpt-4o" = "demo"

[coder]
model = "demo"
system = "You write Python."
temperature = 0.2
top_p = 0.5
presence_penalty = 1.5
stop = ["END"]
max_tokens = 77
num_draft_tokens = 2
reasoning_effort = "high"
keep_alive = "10m"
loop_guard = false
cache = false
chat_template_kwargs = { thinking_budget = 100, enable_thinking = true }

[lost]
model = "owner/nowhere"

[typo]
model = "demo"
temprature = 1
"""
HI = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "You write Python."}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "profiles.toml"


@pytest.fixture(scope="module")
def running(path: Path) -> Generator[Node]:
    with serving_fakes(profiles=ProfileFile(path)) as node:
        yield node


@pytest.fixture
def node(running: Node, path: Path) -> Node:
    _ = path.write_text(TOML)
    running.chat.reset()
    running.chat.scripts["demo"] = says(*ANSWER)
    return running


CHATS = [path for path in BODIES if path != "/v1/completions"]


@pytest.mark.parametrize("endpoint", CHATS)
def test_a_profile_answers_in_every_dialect_under_its_own_name(node: Node, endpoint: str) -> None:
    reply = node.ask("POST", endpoint, {"model": "coder", **BODIES[endpoint], "stream": False})
    assert reply.status == 200, reply.body
    assert reply.json["model"] == "coder"
    (request,) = node.chat.requests
    assert request.model == "demo"
    assert request.messages == (SYSTEM, HI)
    assert (request.sampling.temperature, request.sampling.top_p) == (0.2, 0.5)
    assert request.sampling.presence_penalty == 1.5
    assert {"temperature", "top_p", "presence_penalty"} <= request.explicit_fields
    assert request.limits.max_tokens == (9 if endpoint == "/v1/messages" else 77)
    assert request.limits.stop == ["END"]
    assert request.num_draft_tokens == 2
    assert request.keep_alive_s == 600
    assert request.limits.HasField("loop_guard") and not request.limits.loop_guard
    assert request.options["effort"] == "high"
    assert request.options["kwargs"]["thinking_budget"] == 100


def test_what_a_request_says_goes_before_its_profile(node: Node) -> None:
    own = {
        "messages": [{"role": "system", "content": "Mine."}, HI],
        "temperature": 1,
        "presence_penalty": 0,
        "max_tokens": 3,
        "stop": "X",
        "num_draft_tokens": 0,
        "reasoning_effort": "none",
        "keep_alive": -1,
        "loop_guard": True,
        "cache": True,
        "chat_template_kwargs": {"thinking_budget": 5},
    }
    assert node.ask("POST", "/v1/chat/completions", {"model": "coder", **own}).status == 200
    (request,) = node.chat.requests
    assert [message["content"] for message in request.messages] == ["Mine.", "hi"]
    assert request.sampling.temperature == 1
    assert request.sampling.top_p == 0.5, "which the request left open"
    assert request.sampling.presence_penalty == 0
    assert (request.limits.max_tokens, request.limits.stop, request.num_draft_tokens) == (
        3,
        ["X"],
        0,
    )
    assert request.options == {"effort": "none", "kwargs": {"thinking_budget": 5}}
    assert request.keep_alive_s == float("inf")
    assert request.limits.loop_guard and request.sharing.cache


def test_a_penalty_in_ollamas_words_goes_before_the_profiles(node: Node) -> None:
    own = {"presence_penalty": 0.25, "repeat_penalty": 1.1, "repeat_last_n": 64}
    body = {"model": "coder", "messages": [HI], "stream": False, "options": own}
    assert node.ask("POST", "/api/chat", body).status == 200
    (request,) = node.chat.requests
    assert request.sampling.presence_penalty == 0.25
    names = {"presence_penalty", "repetition_penalty", "repetition_context_size"}
    assert names <= request.explicit_fields
    assert request.profile_fields == request.explicit_fields - names


def test_a_bare_prompt_gets_no_system_message(node: Node) -> None:
    body = {"model": "coder", "prompt": "def f(", "max_tokens": 4}
    assert node.ask("POST", "/v1/completions", body).json["model"] == "coder"
    (request,) = node.chat.requests
    assert (request.text, request.messages, request.options) == ("def f(", (), {})
    assert request.sampling.temperature == 0.2


def test_an_alias_changes_nothing_but_the_name(node: Node) -> None:
    assert node.chat_reply(model="gpt-4o").status == 200
    assert node.chat_reply(model="demo").status == 200
    one, other = node.chat.requests
    assert (one.model, one.messages, one.sampling, one.explicit_fields, one.options) == (
        other.model,
        other.messages,
        other.sampling,
        other.explicit_fields,
        other.options,
    )


def test_tokens_are_counted_with_the_system_message_of_the_profile(node: Node) -> None:
    body = {"model": "coder", "messages": [HI]}
    counted = node.ask("POST", "/v1/messages/count_tokens", {**body, "max_tokens": 1})
    assert counted.json["input_tokens"] == len("You write Python." + "hi")
    assert node.ask("POST", "/v1/tokenize", body).json["count"] == len("You write Python.hi")


def ids(reply: Reply, key: str = "data", name: str = "id") -> list[str]:
    return [entry[name] for entry in reply.json[key]]


def test_lists_of_models_have_them(node: Node) -> None:
    listed = node.ask("GET", "/v1/models")
    assert ids(listed) == ["demo", "owner/large-model", "gpt-4o", "coder", "lost", "typo"]
    by_id = {entry["id"]: entry for entry in listed.json["data"]}
    assert by_id["coder"]["profile_of"] == "demo"
    assert by_id["coder"]["profile"]["temperature"] == 0.2
    assert by_id["coder"]["profile"]["system"] is True
    assert "You write" not in str(listed.json), "a system message is nobody's business"
    assert "owner/nowhere is not on" in by_id["lost"]["error"]
    assert node.ask("GET", "/v1/models/coder").json == by_id["coder"]
    assert node.ask("GET", "/v1/models/").json == node.ask("GET", "/v1/models").json
    assert {entry["display_name"] for entry in by_id.values()} == set(by_id)
    assert node.ask("GET", "/v1/models/demo").json["id"] == "demo"
    assert ids(node.ask("GET", "/v1/models?catalog=1")) == ["owner/catalogued"]
    tags = ids(node.ask("GET", "/api/tags"), "models", "name")
    assert tags == ["demo", "owner/large-model", "gpt-4o", "coder"]
    assert node.ask("POST", "/api/show", {"model": "coder:latest"}).status == 200
    assert node.ask("POST", "/api/show", {"model": "nobody"}).status == 404
    assert node.ask("POST", "/api/show", b"{").status == 400


def test_a_profile_with_a_models_own_id_stands_in_its_place(node: Node, path: Path) -> None:
    _ = path.write_text('demo = "owner/large-model"')
    listed = node.ask("GET", "/v1/models")
    assert ids(listed) == ["owner/large-model", "demo"]
    assert listed.json["data"][-1]["profile_of"] == "owner/large-model"
    assert ids(node.ask("GET", "/api/tags"), "models", "name") == ["owner/large-model", "demo"]


def test_a_bad_profile_names_file_field_and_remedy_and_the_others_stay(
    node: Node, path: Path
) -> None:
    reply = node.chat_reply(model="typo")
    assert reply.status == 404
    for part in (str(path), "'typo'", "'temprature'", "nearest that it knows is 'temperature'"):
        assert part in reply.error["message"]
    assert "remove it" in reply.error["message"]
    assert node.chat_reply(model="coder").status == 200
    assert node.chat_reply(model="lost").status == 404


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("bad = 3", ("'bad' is no profile", "write [bad]")),
        ("bad = {}", ("'bad': 'model' is required", "mend")),
        ('bad = { model = "demo", temperature = 9 }', ("'temperature'", "mend")),
        ('bad = { model = "demo", keep_alive = "soon" }', ("'keep_alive'", "give seconds")),
        ('bad = { model = "demo", keep_alive = true }', ("'keep_alive'", "a duration")),
        ('bad = { model = "demo", regex = "a" }', ("'regex' belongs to a request", "remove it")),
        ('bad = { model = "demo", top_p = nan }', ("'top_p'", "finite")),
        ('" bad" = "demo"', ("is no name",)),
        ('bad = { model = ["demo"] }', ("'model'", "string")),
    ],
)
def test_each_mistake_has_its_remedy(tmp_path: Path, line: str, parts: tuple[str, ...]) -> None:
    path = tmp_path / "profiles.toml"
    _ = path.write_text(f'good = "demo"\n{line}\n')
    profiles = ProfileFile(path)
    assert list(profiles.all()) == ["good"]
    (fault,) = profiles.faults().values()
    assert str(path) in fault.message
    for part in parts:
        assert part in fault.message


def test_a_file_is_read_again_when_it_changes_and_kept_while_it_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "profiles.toml"
    profiles = ProfileFile(path)

    def refreshed() -> list[str]:
        asyncio.run(profiles.refresh())
        return list(profiles.all())

    assert (profiles.all(), profiles.faults()) == ({}, {})
    _ = path.write_text('a = "demo"')
    assert refreshed() == ["a"]
    _ = path.write_text('a = "demo"\nb = ')
    assert refreshed() == ["a"]
    assert "is no TOML" in profiles.faults()["profiles.toml"].message
    _ = path.write_bytes(b"\xff\xfe")
    assert refreshed() == ["a"]
    _ = path.write_text("x = " + "[" * 100_000)
    assert refreshed() == ["a"]
    _ = path.write_text('c = "demo"\n#' + " " * (1 << 20))
    assert refreshed() == ["a"]
    assert "make it shorter" in profiles.faults()["profiles.toml"].message
    _ = path.write_text('b = "demo"\n#')
    assert (refreshed(), profiles.faults()) == (["b"], {})
    path.unlink()
    assert refreshed() == []


def test_a_pipe_in_the_place_of_the_file_stops_nobody(tmp_path: Path) -> None:
    path = tmp_path / "profiles.toml"
    _ = path.write_text(TOML)
    with serving_fakes(profiles=ProfileFile(path)) as node:
        assert node.ask("GET", "/v1/models").status == 200
        path.unlink()
        os.mkfifo(path)
        assert "it is no file" in str(node.ask("GET", "/v1/models").json)
        assert node.ask("GET", "/health/live").status == 200


class Head:
    """The connection to a head with another app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def head_elsewhere(self) -> NodeId:
        return NodeId("head")

    def node_elsewhere(self, name: str) -> None:
        """No request names a node."""

    async def until_gone(self, node: NodeId) -> None:
        _ = await asyncio.Event().wait()

    async def http(self, head: NodeId, request: pb.HttpRequest) -> AsyncGenerator[pb.HttpChunk]:
        async for chunk in answer_forwarded(self._app, request, "127.0.0.1:1", {}):
            yield chunk


def test_a_heads_lists_have_the_profiles_of_the_node_that_was_asked_and_not_its_own(
    path: Path, tmp_path: Path
) -> None:
    _ = path.write_text('"mine \u00e9" = "demo"\nlost = "owner/nowhere"')
    _ = (tmp_path / "other.toml").write_text('"the-heads" = "demo"')
    other = ProfileFile(tmp_path / "other.toml")
    head = Head(build_app(Services(FakeChat(), FakeOperations(), profiles=other), no_files, LOCAL))

    def forwarding(app: ASGIApp) -> ASGIApp:
        return HeadForwarder(app, head, LOCAL)

    with serving_fakes(profiles=ProfileFile(path), between=forwarding) as node:
        listed = ids(node.ask("GET", "/v1/models"))
        assert listed == ["demo", "owner/large-model", "mine \u00e9", "lost"]
        assert ids(node.ask("GET", "/api/tags"), "models", "name") == listed[:3]
        assert node.ask("GET", "/v1/models/lost").json["profile_of"] == "owner/nowhere"
        assert node.ask("POST", "/api/show", {"model": "mine \u00e9"}).status == 200
        assert node.ask("POST", "/api/show", {"model": "lost"}).status == 404


def test_ollama_loads_and_unloads(node: Node) -> None:
    def load(**fields: object) -> Any:
        return node.ask("POST", "/api/generate", {"model": "coder", **fields}).json

    assert load(keep_alive="5m")["done_reason"] == "load"
    assert node.chat.requests[-1].keep_alive_s == 300
    assert node.chat.released == []
    assert load(keep_alive=0)["done_reason"] == "unload"
    assert node.chat.released == ["demo"]
    assert node.ask("POST", "/api/chat", {"model": "demo", "keep_alive": "0s"}).status == 200
    assert node.chat.released == ["demo", "demo"]
    bad = node.ask("POST", "/api/chat", {"model": "demo", "keep_alive": "soon"})
    assert bad.status == 400
    assert "keep_alive" in bad.json["error"]
    assert node.ask("POST", "/v1/chat/completions", chat_body(keep_alive=30)).status == 200
    assert node.chat.requests[-1].keep_alive_s == 30


_STAYS: list[tuple[str, Mapping[str, Any]]] = [
    ("/v1/chat/completions", chat_body()),
    ("/v1/completions", {"model": "demo", "prompt": "a"}),
    ("/api/chat", {"model": "demo", "messages": [HI], "stream": False}),
    ("/api/generate", {"model": "demo", "prompt": "a", "stream": False}),
]


def test_another_user_of_the_machine_unloads_nothing_and_shortens_no_stay(path: Path) -> None:
    _ = path.write_text(TOML)
    local = LocalToken("a" * 64)
    own = {TOKEN_HEADER: local.text}
    with serving_fakes(profiles=ProfileFile(path), token=local) as node:
        for stay in (0, -1, "0.0001", "0s", "1ms", "5m"):
            for where, body in _STAYS:
                for trusted in (False, True):
                    headers = own if trusted else None
                    reply = node.ask("POST", where, {**body, "keep_alive": stay}, headers)
                    assert reply.status == 200, reply.body
                    assert node.chat.requests[-1].trusted is trusted, where
        for where in ("/api/chat", "/api/generate"):
            unloads = {"model": "demo", "keep_alive": 0}
            refused = node.ask("POST", where, unloads)
            assert (refused.status, node.chat.released) == (403, [])
            assert "exo-node models unload" in refused.json["error"]
            loads = node.ask("POST", where, {"model": "demo", "keep_alive": -1})
            assert loads.status == 200 and not node.chat.requests[-1].trusted
            assert node.ask("POST", where, unloads, own).status == 200
            assert node.chat.released == ["demo"]
            node.chat.released.clear()
        # What a profile says is the word of the node's own user, whoever asks by it.
        assert node.ask("POST", "/v1/chat/completions", chat_body(model="coder")).status == 200
        profiled = node.chat.requests[-1]
        assert (profiled.keep_alive_s, profiled.trusted) == (600, True)
        shortened = chat_body(model="coder", keep_alive=0)
        assert node.ask("POST", "/v1/chat/completions", shortened).status == 200
        assert not node.chat.requests[-1].trusted
