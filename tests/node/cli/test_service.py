"""`exo-node service`: its definitions, and the commands with a systemctl that records its calls."""

import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from api_stub import exo_node

from exo_node.node.cli.failures import failure_of
from exo_node.node.cli.service import LABEL, launchd, systemd
from exo_node.node.cluster.node_exit import EXIT_DUPLICATE
from exo_node.placement.errors import InvalidSettings

Service = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Service:
    if sys.platform != "linux":
        pytest.skip("systemd is Linux's")
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.parent.mkdir()
    fault = 'echo "Failed to connect to bus" >&2; exit $EXIT'
    record = f'echo "$@" >> {tmp_path}/calls'
    _ = systemctl.write_text(f'#!/bin/sh\n{record}\ncase "$*" in *"$FAILS"*) {fault};; esac\n')
    systemctl.chmod(0o755)

    def service(*words: str, exit: int = 0, fails: str = "") -> "subprocess.CompletedProcess[str]":
        path = f"{systemctl.parent}{os.pathsep}{os.environ['PATH']}"
        config = str(tmp_path / "config")
        return exo_node(
            "service", *words, PATH=path, XDG_CONFIG_HOME=config, EXIT=str(exit), FAILS=fails
        )

    return service


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def test_it_is_installed_listed_and_removed(run: Service, tmp_path: Path) -> None:
    assert run("status").stdout.startswith("not installed")
    result = run("install", "--data-dir", str(tmp_path / "a folder"))
    assert result.returncode == 0, result.stderr
    unit = tmp_path / "config" / "systemd" / "user" / "exo-node.service"
    assert f'"start" "--data-dir" "{tmp_path}/a folder"' in unit.read_text()
    assert calls(tmp_path) == [
        "--user show-environment",
        "--user daemon-reload",
        "--user enable exo-node.service",
        "--user restart exo-node.service",
    ]
    assert (run("status").returncode, run("status", exit=3).returncode) == (0, 1)
    refused = run("uninstall")
    assert refused.returncode == 2 and "--yes" in refused.stderr and unit.exists()
    assert run("uninstall", "--yes").returncode == 0
    assert not unit.exists() and calls(tmp_path)[-1] == "--user disable --now exo-node.service"


def test_one_that_does_not_stop_is_removed_all_the_same(run: Service, tmp_path: Path) -> None:
    assert run("install").returncode == 0
    result = run("uninstall", "--yes", exit=1, fails="disable")
    assert "stopping it failed: Failed to connect to bus" in result.stderr
    assert run("status").stdout.startswith("not installed")


def test_a_manager_that_refuses_is_an_error(run: Service) -> None:
    result = run("install", exit=1, fails="daemon-reload")
    assert result.returncode == 1 and "daemon-reload" in result.stderr


def test_nothing_is_written_where_no_manager_of_this_user_runs(
    run: Service, tmp_path: Path
) -> None:
    result = run("install", exit=1)
    assert result.returncode == 1
    assert result.stderr.startswith("exo-node: nothing was installed: `systemctl --user")
    assert "Failed to connect to bus" in result.stderr and "enable-linger" in result.stderr
    assert not (tmp_path / "config" / "systemd").exists()
    assert run("status").stdout.startswith("not installed")


def test_what_a_restart_does_not_help_is_not_restarted(tmp_path: Path) -> None:
    wrong_settings = failure_of(InvalidSettings("", param="port"), as_json=False)
    assert wrong_settings is not None
    unit = systemd(tmp_path).definition(["exo-node", "start"]).decode()
    assert f"RestartPreventExitStatus={wrong_settings.exit_code} {EXIT_DUPLICATE}\n" in unit


def test_percent_signs_in_the_settings_path_are_no_specifiers(tmp_path: Path) -> None:
    unit = systemd(tmp_path / "100%h").definition(["exo-node", "start"]).decode()
    assert f"EnvironmentFile=-{tmp_path}/100%%h/exo-node/environment\n" in unit


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    program = tmp_path / "100 % $HOME"
    program.mkdir()
    command = program / "exo-node"
    _ = command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    unit = tmp_path / "exo-node.service"
    _ = unit.write_bytes(systemd(tmp_path).definition([str(command), "start", 'a "quoted" word']))
    verify = ["systemd-analyze", "--user", "verify", str(unit)]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    result = subprocess.run(verify, capture_output=True, text=True, timeout=60, env=env)
    assert (result.returncode, result.stderr) == (0, "")


VALUES = ("array", "data", "date", "dict", "real", "integer", "string", "true", "false")
PLIST = {
    ("plist", ("dict",)),
    *((leaf, ()) for leaf in ("key", "data", "date", "real", "integer", "string", "true", "false")),
    *(("dict pair", ("key", value)) for value in VALUES),
    *(("array item", (value,)) for value in VALUES),
}
"""The children that Apple's PropertyList-1.0.dtd allows each element; `plist` holds one job."""


def outline(text: bytes) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each element with the kinds of its children; those of dicts in pairs."""
    for element in ElementTree.fromstring(text).iter():
        inside = [child.tag for child in element]
        match element.tag:
            case "dict":
                yield from (("dict pair", tuple(pair)) for pair in batched(inside, 2))
            case "array":
                yield from (("array item", (child,)) for child in inside)
            case other:
                yield other, tuple(inside)


def batched(kinds: list[str], size: int) -> Iterator[list[str]]:
    return (kinds[at : at + size] for at in range(0, len(kinds), size))


def test_launchds_definition_has_only_keys_that_its_manual_names(tmp_path: Path) -> None:
    """Names and types of launchd.plist(5); it was run on no Mac."""
    agent = launchd(tmp_path, 501)
    text = agent.definition(["/bin/exo-node", "start"])
    assert b'"-//Apple//DTD PLIST 1.0//EN"' in text
    job = plistlib.loads(text)
    types = {
        "Label": str,
        "ProgramArguments": list,
        "RunAtLoad": bool,
        "KeepAlive": dict,
        "ThrottleInterval": int,
        "ExitTimeOut": int,
        "ProcessType": str,
        "StandardErrorPath": str,
    }
    assert {name: type(value) for name, value in job.items()} == types
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["ProcessType"] in {"Background", "Standard", "Adaptive", "Interactive"}
    assert set(outline(text)) <= PLIST
    assert agent.file.name == f"{job['Label']}.plist" and job["Label"] == LABEL
