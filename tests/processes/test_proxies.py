"""Variables that libraries read by themselves: proxies, and what would end or slow a node."""

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from nodes import chat_body, node, python_path

PROXIES: tuple[str, ...] = ("http_proxy", "https_proxy", "grpc_proxy")


@dataclass
class Proxy:
    """Takes connections, notes what they say first, and closes them."""

    port: int
    calls: list[bytes] = field(default_factory=list[bytes])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def proxy() -> Generator[Proxy]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        noted = Proxy(server.getsockname()[1])

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(5)
                    noted.calls.append(connection.recv(200))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield noted
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize(
    ("names", "direct", "upper"),
    [
        *(((name,), "", False) for name in PROXIES),
        pytest.param(PROXIES, "", False, marks=pytest.mark.smoke, id="all"),
        (PROXIES, "localhost,127.0.0.1", False),
        (PROXIES, "localhost,127.0.0.1", True),
        (PROXIES, "", True),
    ],
)
def test_no_call_of_a_node_goes_through_a_proxy(
    tmp_path: Path, names: tuple[str, ...], direct: str, upper: bool
) -> None:
    with proxy() as dead:
        env = dict.fromkeys(names, dead.url) | ({"no_proxy": direct} if direct else {})
        env = {name.upper(): value for name, value in env.items()} if upper else env
        env["HF_ENDPOINT"] = "http://hub.invalid"
        with node(tmp_path / "n", "--no-mdns", env=env) as running:
            assert running.chat("Hello", max_tokens=3)["usage"]["completion_tokens"] == 3
            reply = running.call("GET", "/v1/models/search?q=tiny")
            assert reply.body["error"]["code"] == "download_failed"
        assert "nobody listens" not in running.log.read_text()
    # What is asked of the hub goes there, and nothing else.
    hosts = {b"/".join(call.split(b"/")[:3]) for call in dead.calls}
    assert hosts == ({b"GET http://hub.invalid"} if "http_proxy" in names else set())


BEHIND_A_PROXY = """
import exo_node.proto.grpc_options as options

options.CHANNEL_OPTIONS = tuple(o for o in options.CHANNEL_OPTIONS if "http_proxy" not in o[0])
"""
"""Calls go where nothing answers, as behind a firewall."""


def test_a_request_whose_runner_no_call_reaches_ends_with_the_reason(tmp_path: Path) -> None:
    _ = (tmp_path / "sitecustomize.py").write_text(BEHIND_A_PROXY)
    env = {"PYTHONPATH": python_path(tmp_path), "http_proxy": "http://127.0.0.1:9"}
    with node(tmp_path / "n", "--no-mdns", env=env) as running:
        reply = running.call("POST", "/v1/chat/completions", chat_body("Hello"))
        assert reply.status == 503, reply
        error = reply.body["error"]
        assert error["code"] == "load_failed"
        assert "stage 0 was loaded" in error["message"]
        assert "the head cannot call it there" in error["message"]
        assert "its process ended" not in running.log.read_text()


def test_variables_that_would_end_or_slow_a_node_are_named_and_have_no_effect(
    tmp_path: Path,
) -> None:
    env = {
        "GRPC_SSL_CIPHER_SUITES": "NONE",
        "GRPC_ADDRESS_HTTP_PROXY": "127.0.0.1:9",
        "GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES": "127.0.0.0/8",
        "HF_HUB_ETAG_TIMEOUT": "soon",
        "OMP_NUM_THREADS": "nonsense",
        "PROMETHEUS_MULTIPROC_DIR": "/nonexistent",
        "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "cpp",
        "TRANSFORMERS_OFFLINE": "maybe",
        "WEB_CONCURRENCY": "many",
    }
    with node(tmp_path / "n", "--no-mdns", env=env) as running:
        assert running.chat("Hello", max_tokens=3)["usage"]["completion_tokens"] == 3
    log = running.log.read_text()
    inherited = {"OMP_NUM_THREADS", "TRANSFORMERS_OFFLINE"}  # runners and helpers do without
    for name, value in env.items():
        assert (f"{name} has no effect on exo-node" in log) == (name not in inherited), log
        assert value == "many" or value not in log
