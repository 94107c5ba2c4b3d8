"""Joining with real processes on loopback by --peer; `bench/joining.py` uses mDNS.

mDNS is off because all tests of this machine share the loopback: fresh nodes of other tests would
ask these, and these would ask them.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Collection, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nodes import COMMAND, Node, eventually, free_ports, node, start_process

from exo_node.node.cli.client import ApiEndpoint, stream
from exo_node.node.join.handshake import spaced

QUIET = "--no-mdns"
WITHIN_S = 120.0
"""Long, so that a loaded machine fails no test."""
ONE_KEY = {"EXO_CLUSTER_KEY": "a" * 32}

pytestmark = pytest.mark.timeout(600)


@contextmanager
def fresh(root: Path, names: Sequence[str], *flags: str, env: Any = None) -> Generator[list[Node]]:
    """Nodes started at once, each with all others as peers."""
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    with ExitStack() as stack, ThreadPoolExecutor(len(names)) as pool:
        contexts: list[AbstractContextManager[Node]] = []
        for name in names:
            peers = [("--peer", f"127.0.0.1:{p}") for other, p in ports.items() if other != name]
            own = ("--grpc-port", str(ports[name]), *(word for pair in peers for word in pair))
            contexts.append(node(root / name, QUIET, *own, *flags, env=env))
        nodes: list[Node] = list(pool.map(stack.enter_context, contexts))
        try:
            yield nodes
        except AssertionError as fault:
            for each in nodes:
                fault.add_note(f"--- {each.data_dir.name}: {joining(each)}\n{each.log.read_text()}")
            raise


def joining(running: Node) -> Any:
    """The body of `GET /v1/join/requests`; empty while the node restarts."""
    try:
        return running.call("GET", "/v1/join/requests", timeout_s=WITHIN_S).body
    except OSError:
        return {"data": [], "asking": []}


def waiting(running: Node) -> list[Any]:
    return [request for request in joining(running)["data"] if request["at"]["self"]]


def cluster(running: Node) -> Any:
    try:
        return running.call("GET", "/v1/cluster", timeout_s=WITHIN_S).body
    except OSError:
        return {"nodes": [], "cluster": None, "self": None}


def alive(running: Node) -> int:
    return [n["status"] for n in cluster(running)["nodes"]].count("alive")


def together(nodes: Sequence[Node]) -> bool:
    return (
        all(alive(n) == len(nodes) for n in nodes)
        and len({cluster(n)["cluster"] for n in nodes}) == 1
    )


def exo_node(running: Node, *words: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs a command on the node's data folder."""
    return subprocess.run(
        [COMMAND, *words, "--data-dir", str(running.data_dir)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )


def key_of(running: Node) -> str:
    return (running.data_dir / "cluster.key").read_text().strip()


def digits(running: Node) -> str | None:
    """The digits that the node shows to its own user."""
    return joining(running).get("digits")


def request_ids(member: Node) -> list[str]:
    """The ids of the requests that it shows."""
    return [request["id"] for request in joining(member)["data"]]


def asks_at(new: Node, member: Node) -> bool:
    """Whether `new` waits at `member`, and shows digits for it."""
    me = cluster(new)["self"]
    return digits(new) is not None and any(request["node"] == me for request in waiting(member))


def approve(member: Node, new: Node) -> "subprocess.CompletedProcess[str]":
    """Types the digits on the new node's screen at a member, as a person does."""
    return exo_node(member, "approve", *spaced(digits(new) or "").split(), cluster(new)["self"])


# ---------------------------------------------------------------------------- by digits


def test_the_digits_of_a_new_node_typed_at_another_make_one_cluster_that_answers(
    tmp_path: Path,
) -> None:
    with fresh(tmp_path, ["a", "b"]) as nodes:
        old, new = nodes
        eventually(lambda: asks_at(new, old), WITHIN_S)
        another_user_may_look_and_no_more(old, new, tmp_path)
        code = digits(new)
        assert code is not None
        assert spaced(code) in new.log.read_text() and spaced(code) in exo_node(new, "nodes").stdout
        for public in (joining(old)["data"], exo_node(old, "nodes").stdout, old.log.read_text()):
            assert not has_digits(str(public), code)
        assert not has_digits(str(events(new)), code)
        port, other_key = new.port, key_of(new)

        by_name = exo_node(old, "approve", "b")
        assert by_name.returncode == 1 and "six digits" in by_name.stderr
        wrong = exo_node(old, "approve", str((int(code) + 1) % 10**6).zfill(6))
        assert wrong.returncode == 1 and "did not match" in wrong.stderr
        eventually(lambda: "did not match" in new.log.read_text(), WITHIN_S)
        eventually(lambda: asks_at(new, old) and digits(new) != code, WITHIN_S)
        right = approve(old, new)
        assert (right.returncode, right.stdout) == (0, ""), right.stderr
        assert "is in the cluster" in right.stderr

        eventually(lambda: together(nodes), WITHIN_S)
        assert new.port == port and new.process.poll() is None
        assert key_of(new) == key_of(old)
        assert (new.data_dir / "cluster.key").stat().st_mode & 0o777 == 0o600
        [aside] = new.data_dir.glob("cluster.key.*")
        assert aside.read_text().strip() == other_key and aside.stat().st_mode & 0o777 == 0o600
        assert not joining(old)["fresh"] and not joining(new)["fresh"]
        assert digits(old) is None and digits(new) is None
        another_user = replace(new, data_dir=tmp_path)
        assert another_user.chat("Who are you?", max_tokens=4)["choices"][0]["message"]["content"]
        no_secret_is_shown(nodes, {key_of(old), other_key})


def has_digits(text: str, code: str) -> bool:
    """Whether the text has the digits, also in two groups, and not within a time or an id."""
    return re.search(rf"(?<![\w.])({code}|{spaced(code)})(?!\w)", text) is not None


def events(node: Node) -> list[object]:
    """The past events of the cluster."""
    return list(stream(ApiEndpoint("127.0.0.1", node.port), "/v1/events?follow=0"))


def no_secret_is_shown(nodes: Sequence[Node], keys: Collection[str]) -> None:
    paths = ("/v1/join/requests", "/v1/cluster", "/v1/settings")
    for each in nodes:
        texts = [str(events(each)), each.log.read_text()]
        texts += [json.dumps(each.call("GET", path).body) for path in paths]
        token = (each.data_dir / "local.token").read_text().strip()
        assert all(s not in text for text in texts for s in (*keys, token))
        assert "Traceback" not in each.log.read_text()


def another_user_may_look_and_no_more(old: Node, new: Node, empty: Path) -> None:
    """L11: a user on loopback without the data folder's token, who may also chat."""
    [request] = waiting(old)
    stranger = replace(new, data_dir=empty)  # a folder without a token
    other = replace(old, data_dir=empty)
    assert stranger.call("GET", "/v1/join/requests").body["digits"] is None
    for method, path, body in (
        ("POST", f"/v1/join/requests/{request['id']}/approve", {"code": digits(new)}),
        ("POST", f"/v1/join/requests/{request['id']}/deny", {}),
        ("POST", "/v1/join/key", {"key": "a" * 32}),
        ("POST", "/v1/join/leave", {}),
        ("POST", "/v1/session/ticket", {}),
        ("POST", "/v1/placements", {"model": "demo"}),
        ("DELETE", "/v1/placements/x", None),
        ("PATCH", "/v1/settings", {"native_mtp_enabled": False}),
    ):
        reply = other.call(method, path, body)
        assert reply.status == 403, (method, path, reply)
        assert reply.body["error"]["code"] == "local_token_required"
    assert waiting(old) and alive(old) == 1
    token = old.data_dir / "local.token"
    assert token.stat().st_mode & 0o777 == 0o600
    link = exo_node(old, "dashboard").stdout.strip()
    ticket = link.partition("#login=")[2]
    session = other.call("POST", "/v1/session", {"ticket": ticket}).body["session"]
    assert session not in (token.read_text().strip(), ticket)
    again = other.call("POST", "/v1/session", {"ticket": ticket})
    assert again.status == 400 and "used before" in again.body["error"]["message"]


def test_a_cluster_that_approves_everything_captures_nobody(tmp_path: Path) -> None:
    """C1: an established node calls the new one, and approves every request again and again."""
    with ExitStack() as stack:
        new = stack.enter_context(node(tmp_path / "new", QUIET))
        before = key_of(new)
        peer = ("--peer", f"127.0.0.1:{new.itself()['port']}")
        owners = {"EXO_CLUSTER_KEY": "b" * 32}
        evil = stack.enter_context(node(tmp_path / "evil", QUIET, *peer, env=ONE_KEY))
        eventually(lambda: waiting(evil), WITHIN_S)
        approves_in_vain(evil)
        assert key_of(new) == before and alive(evil) == 1
        assert "did not match" in new.log.read_text()
        home = stack.enter_context(node(tmp_path / "home", QUIET, *peer, env=owners))
        eventually(lambda: asks_at(new, home), WITHIN_S)
        approves_in_vain(evil)
        assert key_of(new) == before and alive(evil) == 1
        eventually(lambda: asks_at(new, home), WITHIN_S)
        assert approve(home, new).returncode == 0
        eventually(lambda: together([home, new]), WITHIN_S)
        assert key_of(new) == "b" * 32


def approves_in_vain(evil: Node) -> None:
    for attempt in range(6):
        for request in waiting(evil):
            code = request.get("code") or f"{attempt:06d}"
            path = f"/v1/join/requests/{request['id']}/approve"
            assert evil.call("POST", path, {"code": code}).status in (400, 404, 409, 503)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Two nodes of a cluster with a key from a variable; tests leave them unchanged."""
    with fresh(tmp_path_factory.mktemp("members"), ["a", "b"], env=ONE_KEY) as nodes:
        eventually(lambda: together(nodes), WITHIN_S)
        yield nodes


def test_the_digits_are_typed_at_any_member_and_every_member_shows_the_requests(
    members: list[Node], tmp_path: Path
) -> None:
    peer = ("--peer", f"127.0.0.1:{members[0].itself()['port']}")
    with node(tmp_path / "c", QUIET, *peer) as new:
        eventually(lambda: all(joining(m)["data"] for m in members), WITHIN_S)
        requests = [joining(m)["data"][0] for m in members]
        assert [request["at"]["self"] for request in requests] == [True, False]
        wrong = exo_node(members[1], "approve", f"{(int(digits(new) or 0) + 1) % 10**6:06d}")
        assert wrong.returncode == 1 and "did not match" in wrong.stderr
        eventually(lambda: asks_at(new, members[0]), WITHIN_S)
        eventually(
            lambda: len({tuple(request_ids(m)) for m in members}) == 1, WITHIN_S
        )  # it asks again
        command = approve(members[1], new)
        assert command.returncode == 0, command.stderr
        eventually(lambda: together([*members, new]), WITHIN_S)
        assert new.stop() == 0
    eventually(lambda: together(members), WITHIN_S)


@pytest.mark.parametrize("how", ["digits", "key"])
def test_three_fresh_nodes_at_once_become_one_cluster(tmp_path: Path, how: str) -> None:
    with fresh(tmp_path, ["a", "b", "c"], env=ONE_KEY if how == "key" else None) as nodes:
        if how == "digits":  # 50 times: `bench/joining.py`
            founder, *others = nodes
            for new in others:
                eventually(lambda new=new: asks_at(new, founder), WITHIN_S)
                command = approve(founder, new)
                assert command.returncode == 0, command.stderr
        eventually(lambda: together(nodes), WITHIN_S)


# ------------------------------------------------------------------------------- a new key


def test_a_lost_machine_stays_in_the_cluster_that_the_others_leave(tmp_path: Path) -> None:
    with fresh(tmp_path, ["a", "b", "c"]) as nodes:
        one, two, lost = nodes
        for new in (two, lost):
            eventually(lambda new=new: asks_at(new, one), WITHIN_S)
            assert approve(one, new).returncode == 0
        eventually(lambda: together(nodes), WITHIN_S)
        old_key = key_of(one)
        for each in (one, two):
            assert exo_node(each, "leave", "--yes").returncode == 0
        eventually(lambda: asks_at(two, one), WITHIN_S)
        assert approve(one, two).returncode == 0
        eventually(lambda: together([one, two]), WITHIN_S)
        assert key_of(one) == key_of(two) != old_key == key_of(lost)
        # It returns with its old key, and gets nothing.
        _ = lost.stop()
        (lost.data_dir / "node.json").unlink(missing_ok=True)
        peer = ("--peer", f"127.0.0.1:{one.itself()['port']}")
        with node(tmp_path / "c", QUIET, *peer) as back:
            eventually(lambda: "of this cluster" in back.log.read_text(), WITHIN_S)
            assert alive(back) == 1 and alive(one) == alive(two) == 2
            assert key_of(back) == old_key


def test_a_key_from_a_variable_is_neither_left_nor_joined_over(tmp_path: Path) -> None:
    with node(tmp_path / "b", QUIET, env=ONE_KEY) as running:
        neither_left_nor_replaced(running)


def neither_left_nor_replaced(running: Node) -> None:
    """Refuses both for a key from a variable."""
    for path, body in (("/v1/join/leave", {}), ("/v1/join/key", {"key": "b" * 32})):
        reply = running.call("POST", path, body)
        assert reply.status == 400, reply
        assert "EXO_CLUSTER_KEY" in reply.body["error"]["message"]
    assert running.process.poll() is None
    assert not (running.data_dir / "cluster.key").exists()


# ------------------------------------------------------------------- by key, and out again


def test_a_running_node_takes_a_key_from_stdin_at_once_and_leaves_again(tmp_path: Path) -> None:
    with fresh(tmp_path, ["a", "b"]) as nodes:
        one, two = nodes
        key = exo_node(one, "key").stdout.strip()
        assert key == key_of(one)
        command = exo_node(two, "join", stdin=f"{key}\n")
        assert command.returncode == 0, command.stderr
        eventually(lambda: together(nodes), WITHIN_S)
        leave = exo_node(two, "leave", "--yes")
        assert leave.returncode == 0, leave.stderr
        eventually(lambda: len(cluster(one)["nodes"]) == 1 and alive(two) == 1, WITHIN_S)
        assert key_of(two) != key and " left" in one.log.read_text()
        # It does not ask the cluster that it left.
        assert joining(two)["asking"] == []
        assert all(key not in n.log.read_text() for n in nodes)


def test_a_stopped_node_takes_a_key_for_its_next_start(tmp_path: Path) -> None:
    command = subprocess.run(
        [COMMAND, "join", "-", "--data-dir", str(tmp_path / "d")],
        input="a" * 32,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert command.returncode == 0, command.stderr
    assert (tmp_path / "d" / "cluster.key").read_text().strip() == "a" * 32
    refused = subprocess.run(
        [COMMAND, "join", "-", "--data-dir", str(tmp_path / "d")],
        input="no key",
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert refused.returncode == 2 and "no key" not in refused.stderr


# ------------------------------------------------------------------------------- refused


def _copy(original: Node, folder: Path) -> Path:
    """Copies the data folder, as a backup or a cloned disk does."""
    folder.mkdir()
    for name in ("node.key", "cluster.key", "cluster.fresh"):
        if (original.data_dir / name).exists():
            _ = shutil.copy(original.data_dir / name, folder / name)
    return folder


def test_a_copied_data_folder_is_refused_by_the_first_and_exits_with_3(tmp_path: Path) -> None:
    with node(tmp_path / "first", QUIET) as first:
        copy = _copy(first, tmp_path / "copy")
        assert _status(copy, first) == 3
        assert "runs already" in (copy / "log").read_text()
        assert first.log.read_text().count("runs already") == 1
        assert [n["status"] for n in cluster(first)["nodes"]] == ["alive"]


def _status(data_dir: Path, peer: Node, env: Any = None) -> int:
    """The exit status of a node that gets `peer` as its peer."""
    process = start_process(
        data_dir, QUIET, "--peer", f"127.0.0.1:{peer.itself()['port']}", env=env
    )
    try:
        return process.wait(WITHIN_S)
    finally:
        process.kill()
        _ = process.wait()
