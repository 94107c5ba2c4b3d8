"""API tokens over HTTP: what counts as a key, who is asked for one, refusals in each dialect."""

import asyncio
import hashlib
import logging
import secrets
import threading
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes import ANSWER, Event
from http_node import PATIENCE_S, Node, Reply, chat_body, raw_chat, serving_fakes
from nodes import eventually

from exo_node.node.trust.api_tokens import ApiTokens
from exo_node.node.trust.local_token import TOKEN_HEADER, LocalToken
from exo_node.node.trust.token_file import create_token, revoke_token

CHAT = "/v1/chat/completions"
DIALECTS = {
    CHAT: ("error", "message"),
    "/v1/completions": ("error", "message"),
    "/v1/responses": ("error", "message"),
    "/v1/messages": ("error", "message"),
    "/api/chat": ("error",),
}


@dataclass
class Served:
    node: Node
    folder: Path
    local: LocalToken

    def get(self, headers: dict[str, str] | None = None, path: str = "/v1/models") -> Reply:
        return self.node.ask("GET", path, headers=headers)

    def chat(self, token: str) -> Reply:
        return self.node.ask("POST", CHAT, chat_body(), bearer(token))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def served(tmp_path: Path) -> Generator[Served]:
    """On loopback and without EXO_API_KEY."""
    local = LocalToken(secrets.token_hex(32))
    with serving_fakes(tokens=ApiTokens(tmp_path), token=local) as node:
        yield Served(node, tmp_path, local)


def test_the_first_token_closes_a_running_node_to_all_without_one(served: Served) -> None:
    assert served.get().status == 200
    token = create_token(served.folder, "laptop")
    assert served.get().status == 401
    assert served.get(bearer("any")).status == 401
    assert served.get({"x-api-key": served.local.text}).status == 401, "that is no client's"
    for credentials in (bearer(token), {"x-api-key": token}, bearer("any") | {"x-api-key": token}):
        assert served.get(credentials).status == 200
    assert served.chat(token).status == 200
    for path in ("/health/live", "/health/ready"):
        assert served.get(path=path).status == 200


def test_a_token_has_the_rights_of_the_key(served: Served) -> None:
    body = {"native_mtp_enabled": False}
    token = create_token(served.folder, "laptop")
    assert served.node.ask("PATCH", "/v1/settings", body).status == 401
    assert served.node.ask("PATCH", "/v1/settings", body, bearer(token)).status == 200
    # The name that a page's address had is no matter to who has a key.
    assert served.get({"Host": "evil.example"}).status == 421
    assert served.get({"Host": "evil.example", **bearer("wrong")}).status == 421
    assert served.get({"Host": "evil.example", **bearer(token)}).status == 200


def test_prompts_of_different_tokens_are_kept_apart_and_the_users_own_are_together(
    served: Served,
) -> None:
    """Their salt reveals neither the token nor its digest."""

    def salt(headers: dict[str, str]) -> bytes:
        assert served.node.ask("POST", CHAT, chat_body(), headers).status == 200
        return served.node.chat.requests[-1].sharing.cache_salt

    assert salt({}) == salt({TOKEN_HEADER: served.local.text}) == b""
    one, two = (create_token(served.folder, name) for name in ("one", "two"))
    own = salt({TOKEN_HEADER: served.local.text})
    salts = [salt(bearer(one)), salt(bearer(two)), salt({"x-api-key": one})]
    assert own == b"" and salts[0] == salts[2] != salts[1] and all(salts)
    assert [len(each) for each in salts] == [8, 8, 8]
    for token in (one, two):
        stored = hashlib.sha256(token.encode()).hexdigest()
        assert not any(each.hex() in stored or each.hex() in token for each in salts)
    for where, body in (
        ("/v1/completions", {"model": "demo", "prompt": "a"}),
        ("/v1/messages", chat_body(max_tokens=8)),
        ("/v1/responses", {"model": "demo", "input": "a"}),
        ("/api/chat", chat_body(stream=False)),
        ("/api/generate", {"model": "demo", "prompt": "a", "stream": False}),
    ):
        assert served.node.ask("POST", where, body, bearer(two)).status == 200
        assert served.node.chat.requests[-1].sharing.cache_salt == salts[1], where
    assert revoke_token(served.folder, "one") == 1
    again = create_token(served.folder, "one")
    assert salt(bearer(again)) not in salts, "a token of the same name may be another's"


def test_the_nodes_own_user_needs_no_token(served: Served) -> None:
    _ = create_token(served.folder, "laptop")
    own = {TOKEN_HEADER: served.local.text}
    assert served.get(own).status == 200
    assert served.get({TOKEN_HEADER: "0" * 64}).status == 401
    ticket = served.node.ask("POST", "/v1/session/ticket", {}, own).json["ticket"]
    assert served.node.ask("POST", "/v1/session/ticket", {}).status == 401
    session = served.node.ask("POST", "/v1/session", {"ticket": ticket}).json["session"]
    assert served.get({TOKEN_HEADER: session}).status == 200
    assert served.node.ask("POST", "/v1/session", {"ticket": ticket}).status == 400


def test_an_answer_outlives_its_token_and_the_next_request_does_not(served: Served) -> None:
    token, go = create_token(served.folder, "laptop"), threading.Event()

    async def script() -> AsyncGenerator[Event]:
        yield ANSWER[0]
        while not go.is_set():
            await asyncio.sleep(0.01)
        for event in ANSWER[1:]:
            yield event

    served.node.chat.scripts["slow"] = script
    key = f"\r\nAuthorization: Bearer {token}\r\nContent-Type".encode()
    request = raw_chat(model="slow", stream=True).replace(b"\r\nContent-Type", key, 1)
    with served.node.raw(request.replace(b"{port}", str(served.node.port).encode())) as connection:
        assert served.node.chat.began.wait(PATIENCE_S)
        _ = revoke_token(served.folder, "laptop")
        assert served.chat(token).status == 401
        go.set()
        received = b""
        while b"[DONE]" not in received:
            received += (piece := connection.recv(65536))
            assert piece


@pytest.mark.parametrize(("path", "where"), DIALECTS.items())
def test_each_dialect_refuses_in_its_own_shape(
    served: Served, path: str, where: tuple[str, ...]
) -> None:
    _ = create_token(served.folder, "laptop")
    reply = served.node.ask("POST", path, {}, bearer("wrong"))
    assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    value = reply.json
    if path == "/v1/messages":
        assert (value["type"], value["error"]["type"]) == ("error", "authentication_error")
    elif path != "/api/chat":
        assert value["error"]["code"] == "invalid_api_key"
    for name in where:
        value = value[name]
    assert "API key or a token" in value


def test_the_key_and_tokens_are_good_beside_each_other(tmp_path: Path) -> None:
    local = LocalToken(secrets.token_hex(32))
    with serving_fakes(api_key="key", tokens=ApiTokens(tmp_path), token=local) as node:
        token = create_token(tmp_path, "laptop")
        for key, status in (("key", 200), (token, 200), ("other", 401)):
            assert node.ask("GET", "/v1/models", headers=bearer(key)).status == status
        # As without tokens: EXO_API_KEY takes the place of the data folder's token.
        assert node.ask("GET", "/v1/models", headers={TOKEN_HEADER: local.text}).status == 401
        assert node.ask("POST", "/v1/session", {"ticket": local.ticket()}).status == 401


def test_beyond_loopback_a_key_is_needed_also_where_there_is_no_token(tmp_path: Path) -> None:
    with serving_fakes(tokens=ApiTokens(tmp_path, always=True)) as node:
        assert node.ask("GET", "/v1/models").status == 401
        token = create_token(tmp_path, "laptop")
        assert node.ask("GET", "/v1/models", headers=bearer(token)).status == 200


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/audio/speech", "/v1/placements/"])
def test_what_is_not_served_needs_no_token_of_the_users(served: Served, path: str) -> None:
    """A client learns that there is nothing, and not that it lacks a token."""
    reply = served.node.ask("POST", path, {})
    assert (reply.status, reply.error["code"]) == (404, "not_found")
    for there in ("/v1/placements", "/v1/placements/preview"):
        assert served.node.ask("POST", there, {}).error["code"] == "local_token_required"
    _ = create_token(served.folder, "laptop")
    assert served.node.ask("POST", path, {}).status == 401


def test_a_token_is_in_no_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = create_token(served.folder, "laptop")
    assert served.chat(token).status == 200
    assert served.chat(token + "x").status == 401
    # The guard logs once the response is on its way: the client may be ahead of it.
    eventually(lambda: f"POST {CHAT} 401" in caplog.text, PATIENCE_S)
    assert token[4:] not in caplog.text
