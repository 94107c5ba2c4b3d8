"""Joining with real processes on loopback, found through --peer; `bench/joining.py` has mDNS.

mDNS is off here because every test of this machine shares the loopback: fresh nodes of another
test would ask, and be asked.
"""

import json
import shutil
import socket
import subprocess
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from nodes import COMMAND, Node, eventually, node, start_process

from exo_node.node.join import spaced

QUIET = "--no-mdns"


def free_ports(count: int) -> list[int]:
    """Ports with the next one free as well, which the join port then is."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            if all(abs(port - other) > 1 for other in found):
                found.append(port)
    return found


@contextmanager
def fresh(root: Path, names: Sequence[str], *flags: str, env: Any = None) -> Generator[list[Node]]:
    """Nodes started at once, each told of all others."""
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
    """`GET /v1/join/requests`; empty while the node is being built anew."""
    try:
        return running.call("GET", "/v1/join/requests", timeout_s=5).body
    except OSError:
        return {"data": [], "asking": []}


def waiting(running: Node) -> list[Any]:
    return [request for request in joining(running)["data"] if request["at"]["self"]]


def cluster(running: Node) -> Any:
    try:
        return running.call("GET", "/v1/cluster", timeout_s=5).body
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
    """A command on the node's data folder, its answer and its complaint."""
    return subprocess.run(
        [COMMAND, *words, "--data-dir", str(running.data_dir)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )


def key_of(running: Node) -> str:
    return (running.data_dir / "cluster.key").read_text().strip()


def asked(nodes: Sequence[Node]) -> tuple[Node, Node]:
    """(the node that is asked, the one that asks) of two fresh ones, once the digits are there."""
    eventually(lambda: any(waiting(n) for n in nodes), 20)
    one, two = nodes
    return (one, two) if waiting(one) else (two, one)


# ---------------------------------------------------------------------------- by approval


def test_two_fresh_nodes_show_the_same_digits_and_become_one_cluster_that_answers(
    tmp_path: Path,
) -> None:
    with fresh(tmp_path, ["a", "b"]) as nodes:
        old, new = asked(nodes)
        assert cluster(old)["self"] < cluster(new)["self"], "the smaller id founds"
        [request], [ask] = waiting(old), joining(new)["asking"]
        code = request["code"]
        assert code == ask["code"] and request["node"] == cluster(new)["self"]
        for each in (old, new):  # on both screens, in the log and in the table
            assert spaced(code) in each.log.read_text()
            assert spaced(code) in exo_node(each, "nodes").stdout
        port, other_key = new.port, key_of(new)

        wrong = exo_node(old, "approve", str((int(code) + 1) % 10**6).zfill(6))
        assert wrong.returncode == 1 and "approve nothing" in wrong.stderr
        right = exo_node(old, "approve", *spaced(code).split())
        assert (right.returncode, right.stdout) == (0, ""), right.stderr
        assert "is in the cluster" in right.stderr

        eventually(lambda: together(nodes), 15)
        assert new.port == port and new.process.poll() is None
        assert key_of(new) == key_of(old)
        assert (new.data_dir / "cluster.key").stat().st_mode & 0o777 == 0o600
        [aside] = new.data_dir.glob("cluster.key.*")
        assert aside.read_text().strip() == other_key and aside.stat().st_mode & 0o777 == 0o600
        assert not joining(old)["fresh"] and not joining(new)["fresh"]
        assert new.chat("Who are you?")["choices"][0]["message"]["content"]
        paths = ("/v1/join/requests", "/v1/cluster", "/v1/settings")
        for each in nodes:
            told = [exo_node(each, "events", "--json").stdout, each.log.read_text()]
            told += [json.dumps(each.call("GET", path).body) for path in paths]
            assert all(key not in text for text in told for key in (key_of(old), other_key))
            assert "Traceback" not in each.log.read_text()


def test_a_denied_node_stays_alone_and_both_screens_say_so(tmp_path: Path) -> None:
    with fresh(tmp_path, ["a", "b"]) as nodes:
        old, new = asked(nodes)
        before = key_of(new)
        done = exo_node(old, "deny", waiting(old)[0]["name"])
        assert done.returncode == 0, done.stderr
        eventually(lambda: "a person refused it" in new.log.read_text(), 10)
        assert "a person refused it" in old.log.read_text()
        assert waiting(old) == [] and key_of(new) == before
        assert alive(old) == alive(new) == 1
        nothing = exo_node(old, "approve")
        assert nothing.returncode == 1 and "no node asks" in nothing.stderr


def test_any_member_approves_and_every_member_shows_the_request(tmp_path: Path) -> None:
    with fresh(tmp_path, ["a", "b"], env={"EXO_CLUSTER_KEY": "a" * 32}) as members:
        eventually(lambda: together(members), 15)
        peer = ("--peer", f"127.0.0.1:{members[0].itself()['port']}")
        with node(tmp_path / "c", QUIET, *peer) as new:
            eventually(lambda: all(joining(m)["data"] for m in members), 15)
            shown = [joining(m)["data"][0] for m in members]
            assert shown[0]["code"] == shown[1]["code"] == joining(new)["asking"][0]["code"]
            assert [request["at"]["self"] for request in shown] == [True, False]
            done = exo_node(members[1], "approve", shown[1]["code"])
            assert done.returncode == 0, done.stderr
            eventually(lambda: together([*members, new]), 15)


@pytest.mark.parametrize("how", ["approvals", "open"])
def test_three_fresh_nodes_at_once_become_one_cluster(tmp_path: Path, how: str) -> None:
    flags = ("--open", "lab") if how == "open" else ()
    for attempt in range(2 if how == "approvals" else 1):  # 50 times: `bench/joining.py`
        with fresh(tmp_path / str(attempt), ["a", "b", "c"], *flags) as nodes:

            def one_cluster(nodes: list[Node] = nodes) -> bool:
                if how == "approvals":
                    approve_all(nodes)
                return together(nodes)

            eventually(one_cluster, 40)
            if how == "open":
                assert any("OPEN" in n.log.read_text() for n in nodes)


def approve_all(nodes: Sequence[Node]) -> None:
    """What a person does who looks at every screen: digits that two of them show are approved."""
    shown = {ask["code"] for n in nodes for ask in joining(n)["asking"]}
    for each in nodes:
        for request in waiting(each):
            if request["code"] in shown:
                path = f"/v1/join/requests/{request['id']}/approve"
                reply = each.call("POST", path, {"code": request["code"]})
                assert reply.status in (200, 404), reply  # 404: it has just gone elsewhere


# ------------------------------------------------------------------- by key, and out again


def test_a_running_node_takes_a_key_from_stdin_at_once_and_leaves_again(tmp_path: Path) -> None:
    with fresh(tmp_path, ["a", "b"]) as nodes:
        one, two = nodes
        key = exo_node(one, "key").stdout.strip()
        assert key == key_of(one)
        done = exo_node(two, "join", stdin=f"{key}\n")
        assert done.returncode == 0, done.stderr
        eventually(lambda: together(nodes), 15)
        left = exo_node(two, "leave", "--yes")
        assert left.returncode == 0, left.stderr
        eventually(lambda: len(cluster(one)["nodes"]) == 1 and alive(two) == 1, 15)
        assert key_of(two) != key and " left" in one.log.read_text()
        # It does not ask the cluster that it was told to leave.
        assert joining(two)["asking"] == []
        assert all(key not in n.log.read_text() for n in nodes)


def test_a_stopped_node_takes_a_key_for_its_next_start(tmp_path: Path) -> None:
    done = subprocess.run(
        [COMMAND, "join", "-", "--data-dir", str(tmp_path / "d")],
        input="a" * 32,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "d" / "cluster.key").read_text().strip() == "a" * 32
    refused = subprocess.run(
        [COMMAND, "join", "-", "--data-dir", str(tmp_path / "d")],
        input="no key",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert refused.returncode == 2 and "no key" not in refused.stderr


def test_a_key_that_a_variable_gave_is_neither_left_nor_replaced(tmp_path: Path) -> None:
    with node(tmp_path / "a", QUIET, env={"EXO_CLUSTER_KEY": "a" * 32}) as running:
        for path, body in (("/v1/join/leave", {}), ("/v1/join/key", {"key": "b" * 32})):
            reply = running.call("POST", path, body)
            assert reply.status == 400, reply
            assert "EXO_CLUSTER_KEY" in reply.body["error"]["message"]
        assert running.process.poll() is None
        assert not (running.data_dir / "cluster.key").exists()


# ------------------------------------------------------------------------------- refused


def test_two_established_clusters_name_each_other_once_and_stay_apart(tmp_path: Path) -> None:
    with (
        node(tmp_path / "a", QUIET, env={"EXO_CLUSTER_KEY": "a" * 32}) as one,
        node(
            tmp_path / "b",
            QUIET,
            "--peer",
            f"127.0.0.1:{one.itself()['port']}",
            env={"EXO_CLUSTER_KEY": "b" * 32},
        ) as two,
    ):
        for each in (one, two):
            eventually(lambda each=each: "is of another cluster" in each.log.read_text(), 15)
            assert each.log.read_text().count("is of another cluster") == 1
            assert "Handshake failed" not in each.log.read_text(), "gRPC tells it every second"
        assert "of this cluster" in two.log.read_text()
        assert alive(one) == alive(two) == 1


def _copy(original: Node, folder: Path) -> Path:
    """The data folder as a backup or a cloned disk would have it."""
    folder.mkdir()
    for name in ("node.key", "cluster.key", "cluster.fresh"):
        if (original.data_dir / name).exists():
            _ = shutil.copy(original.data_dir / name, folder / name)
    return folder


def test_a_copied_data_folder_is_refused_by_the_first_and_exits_with_3(tmp_path: Path) -> None:
    with node(tmp_path / "first", QUIET) as first:
        copy = _copy(first, tmp_path / "copy")
        process = start_process(copy, QUIET, "--peer", f"127.0.0.1:{first.itself()['port']}")
        try:
            assert process.wait(20) == 3
        finally:
            process.kill()
            _ = process.wait()
        assert "runs already" in (copy / "log").read_text()
        assert first.log.read_text().count("runs already") == 1
        assert [n["status"] for n in cluster(first)["nodes"]] == ["alive"]


def test_a_copied_data_folder_is_refused_by_others_and_the_first_is_unaffected(
    tmp_path: Path,
) -> None:
    with fresh(tmp_path, ["a", "b"], env={"EXO_CLUSTER_KEY": "a" * 32}) as nodes:
        eventually(lambda: together(nodes), 15)
        first, third = nodes
        copy = _copy(first, tmp_path / "copy")
        process = start_process(
            copy,
            QUIET,
            "--peer",
            f"127.0.0.1:{third.itself()['port']}",
            env={"EXO_CLUSTER_KEY": "a" * 32},
        )
        try:
            assert process.wait(20) == 3
        finally:
            process.kill()
            _ = process.wait()
        assert "runs already" in (copy / "log").read_text()
        assert "runs already" in third.log.read_text()
        assert together(nodes)
        assert "restarted" not in third.log.read_text()


def test_a_node_with_a_copied_node_key_alone_is_not_let_in(tmp_path: Path) -> None:
    with fresh(tmp_path, ["a", "b"], env={"EXO_CLUSTER_KEY": "a" * 32}) as nodes:
        eventually(lambda: together(nodes), 15)
        first, third = nodes
        (tmp_path / "copy").mkdir()
        _ = shutil.copy(first.data_dir / "node.key", tmp_path / "copy" / "node.key")
        peer = f"127.0.0.1:{third.itself()['port']}"
        process = start_process(tmp_path / "copy", QUIET, "--peer", peer)
        try:
            assert process.wait(20) == 3
        finally:
            process.kill()
            _ = process.wait()
        eventually(lambda: "runs already" in third.log.read_text(), 5)
        assert waiting(third) == []
        assert together(nodes)


def test_a_node_that_is_killed_and_comes_back_at_another_port_is_no_copy(tmp_path: Path) -> None:
    env = {"EXO_CLUSTER_KEY": "a" * 32}
    with node(tmp_path / "a", QUIET, env=env) as one:
        peer = ("--peer", f"127.0.0.1:{one.itself()['port']}")
        with node(tmp_path / "b", QUIET, *peer, env=env) as two:
            eventually(lambda: together([one, two]), 15)
            two.process.kill()
            _ = two.process.wait()
        (two.data_dir / "node.json").unlink()  # `node` waits for the next process's
        with node(tmp_path / "b", QUIET, *peer, env=env) as again:
            eventually(lambda: together([one, again]), 15)
