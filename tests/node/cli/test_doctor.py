"""`exo-node doctor` and `exo-node report`, over a stub of the node."""

import errno
import json
import platform
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from api_stub import Stub, as_events, as_json, exo_node

from exo_node.node.cli import doctor as doctor_module
from exo_node.node.cli.doctor import disk, vision_extra
from exo_node.node.machine import local_network, settings
from exo_node.node.machine.interfaces import Interface
from exo_node.placement.errors import ExoNodeError

SECRET = "the cluster key"


def reaches(name: str, **changes: Any) -> dict[str, Any]:
    member = {"name": name, "address": "10.0.0.2:52416", "mdns": True, "heard_ago_s": 0.4}
    return {**member, **changes}


def answers(stub: Stub, *others: dict[str, Any], **cluster: Any) -> None:
    me = {"name": "one", "self": True, "version": "1", "status": "alive", "port": 52416}
    members = [reaches(other["name"]) for other in others]
    reach = {"mdns": "works", "mdns_failure": None, "members": members}
    stub.replies["/v1/cluster/reach"] = as_json(reach)
    view = {"head": "a", "nodes": [me, *others], **cluster}
    stub.replies["/v1/cluster"] = as_json(view)
    stub.replies["/v1/join/requests"] = as_json({"data": []})


def doctor(stub: Stub) -> Any:
    result = exo_node("doctor", "--json", "--port", str(stub.port))
    findings = json.loads(result.stdout)["findings"]
    assert (result.returncode == 1) == any(each["state"] == "wrong" for each in findings)
    return findings


def of(findings: Any, what: str) -> list[tuple[str, str]]:
    return [(each["state"], each["text"]) for each in findings if each["what"] == what]


def test_a_sound_node_has_nothing_wrong(stub: Stub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        other = {"name": "two", "host": "127.0.0.1", "port": port, "version": "1"}
        answers(stub, {**other, "status": "alive"})
        findings = doctor(stub)
    assert "wrong" not in {each["state"] for each in findings}
    [(state, text)] = of(findings, "member")
    assert state == "ok" and text.startswith("two at 127.0.0.1")


def test_what_is_wrong_is_told_with_its_remedy(stub: Stub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    absent = {"name": "gone", "host": "127.0.0.1", "port": port, "version": "1", "status": "dead"}
    answers(
        stub,
        absent,
        {**absent, "name": "old", "version": "0"},
        head=None,
        trouble="no disk",
        offline="EXO_OFFLINE",
    )
    findings = doctor(stub)
    assert [state for state, _ in of(findings, "downloads")] == ["warning"]
    wrong = {each["text"]: each["remedy"] for each in findings if each["state"] == "wrong"}
    assert {"none is elected", "no disk", "old has version 0, this node 1"} <= wrong.keys()
    [remedy] = [wrong[text] for text in wrong if text.startswith("gone at")]
    assert f"port {port}" in remedy and "firewall" in remedy


def test_who_is_not_reached_both_ways_is_told_with_a_remedy(stub: Stub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        other = {"name": "two", "host": "127.0.0.1", "port": port, "version": "1"}
        answers(stub, {**other, "status": "alive"})
        members = [
            reaches("silent", mdns=False, heard_ago_s=None),
            reaches("slow", heard_ago_s=400.0),
        ]
        reach = {"mdns": "works", "mdns_failure": None, "members": members}
        stub.replies["/v1/cluster/reach"] = as_json(reach)
        findings = doctor(stub)
        stub.replies["/v1/cluster/reach"] = as_json(
            {**reach, "mdns": "failed", "mdns_failure": "x"}
        )
        failed = doctor(stub)
    states = {(each["what"], each["text"].split()[0]): each for each in findings}
    assert {
        key for key, each in states.items() if each["state"] != "ok" and key[0] != "memory"
    } >= {("way back", "silent"), ("way back", "slow"), ("multicast", "silent")}
    assert "TCP port 52416" in states["way back", "silent"]["remedy"]
    assert "--peer 10.0.0.2:52416" in states["multicast", "silent"]["remedy"]
    assert of(failed, "multicast") == [("warning", "x")]


def test_without_a_node_it_says_so(tmp_path: Path) -> None:
    assert "no node runs" in exo_node("doctor", EXO_DATA_DIR=str(tmp_path)).stdout


def test_a_file_in_place_of_the_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert disk("data folder", tmp_path / "file").state == "wrong"


def test_a_report_holds_what_may_be_seen_and_no_secret(stub: Stub, tmp_path: Path) -> None:
    answers(stub)
    stub.replies["/v1/events?follow=0&limit=200"] = as_events({"kind": "joined", "text": "two"})
    for path in ("placements", "models", "settings", "mtp/stats"):
        stub.replies[f"/v1/{path}"] = as_json({"data": []})
    _ = (tmp_path / "cluster.key").write_text(SECRET)
    file = tmp_path / "report.json"
    _ = file.write_text("an older one, which others may read")
    result = exo_node("report", str(file), "--port", str(stub.port), EXO_DATA_DIR=str(tmp_path))
    assert file.stat().st_mode & 0o777 == 0o600
    assert result.returncode == 0, result.stderr
    saved = json.loads(file.read_text())
    assert saved["cluster"]["nodes"][0]["name"] == "one"
    assert saved["events"] == [{"kind": "joined", "text": "two"}]
    assert "error" in saved["profile"]  # a part that fails does not take the others away
    assert SECRET not in file.read_text() and saved["findings"]


def test_a_report_that_cannot_be_written_is_an_error(stub: Stub) -> None:
    answers(stub)
    result = exo_node("report", "/nowhere/at/all", "--port", str(stub.port))
    assert result.returncode == 1 and "cannot be written" in result.stderr


def test_images_and_encoders_are_named_with_both_ways_to_add_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = vision_extra()
    assert "for images, encoders (BERT" in installed.text and not installed.remedy
    assert "and the models that only mlx-vlm has: mlx-vlm 0." in installed.text
    monkeypatch.setattr(doctor_module, "has_extra", lambda: False)
    checks = vision_extra()
    assert checks.state == "ok"
    assert "no images" in checks.text and "encoders (BERT, " in checks.text
    assert "and the models that only mlx-vlm has are not loaded" in checks.text
    assert "exo-node[vision]" in checks.remedy and "--no-deps 'mlx-vlm<0.8' pillow" in checks.remedy


def test_a_mac_that_keeps_this_program_from_its_network_is_told_what_to_press(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def blocked(address: str) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host", address)

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(settings, "installed_distributions", lambda: {"mlx", "mlx-metal"})
    monkeypatch.setattr(local_network, "_send", blocked)
    monkeypatch.setattr(doctor_module, "own_interfaces", lambda: [Interface("en0", "10.0.0.5")])
    no_node = ExoNodeError("no node runs")
    checks = {each.what: each for each in doctor_module.check_all(tmp_path, no_node)}
    assert checks["network"].state == "wrong"
    assert "System Settings > Privacy & Security > Local Network" in checks["network"].remedy
    assert checks["backend"].text.startswith("metal on ")
