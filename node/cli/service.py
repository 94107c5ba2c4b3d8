"""`exo-node service`: the node as this user's service, by systemd on Linux and launchd on macOS."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import typer

from ...placement.errors import ExoNodeError
from ..machine.private_files import replace_private
from .flags import AsJson, DataDir, Yes, client_settings, group
from .output import confirm, joined, note
from .times import TIMES

UNIT: Final = "exo-node.service"
LABEL: Final = "exo-node.node"

_NO_MANAGER: Final = (
    "your services run while you are logged in on the machine itself; on Linux `sudo loginctl "
    "enable-linger $USER` starts them without that: log in again then, and repeat the command"
)

service = group("Run the node whenever you are logged in.")


@dataclass(frozen=True, slots=True)
class Manager:
    """The program that starts and watches services on this system, by its commands."""

    file: Path
    """The file of the service's definition."""
    definition: Callable[[list[str]], bytes]
    """The content of the file for the command that starts a node."""
    look: list[str]
    """Changes nothing, and succeeds where this user's manager runs."""
    start: list[list[str]]
    """Load the definition and start the service."""
    stop: list[str]
    state: list[str]
    """Its exit status is 0 while the service runs."""


def systemd(folder: Path) -> Manager:
    """The manager of Linux; `folder` holds this user's configuration."""
    base = ["systemctl", "--user"]
    return Manager(
        file=folder / "systemd" / "user" / UNIT,
        definition=partial(_unit, folder),
        look=[*base, "show-environment"],
        start=[[*base, "daemon-reload"], [*base, "enable", UNIT], [*base, "restart", UNIT]],
        stop=[*base, "disable", "--now", UNIT],
        state=[*base, "is-active", "--quiet", UNIT],
    )


def _unit(folder: Path, command: list[str]) -> bytes:
    lines = [
        "[Unit]",
        "Description=exo-node: large models on the machines of this cluster",
        "",
        "[Service]",
        f"ExecStart={_command_line(command)}",
        # Settings and keys; lines such as EXO_API_KEY=…
        f"EnvironmentFile=-{str(folder).replace('%', '%%')}/exo-node/environment",
        "Restart=on-failure",
        "RestartSec=5",
        # Wrong settings, and another process with this node's id: a restart helps neither.
        "RestartPreventExitStatus=2 3",
        f"TimeoutStopSec={TIMES.service_stop_s}",
        "",
        "[Install]",
        "WantedBy=default.target",
        "",
    ]
    return "\n".join(lines).encode()


def launchd(home: Path, uid: int) -> Manager:
    """The manager of macOS, after launchd.plist(5) and launchctl(1); it was run on no Mac."""
    file = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    return Manager(
        file=file,
        definition=partial(_agent, home / "Library" / "Logs" / "exo-node.log"),
        look=["launchctl", "print", f"gui/{uid}"],
        start=[["launchctl", "bootstrap", f"gui/{uid}", str(file)]],
        stop=["launchctl", "bootout", f"gui/{uid}/{LABEL}"],
        state=["launchctl", "print", f"gui/{uid}/{LABEL}"],
    )


def _agent(log: Path, command: list[str]) -> bytes:
    import plistlib

    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": command,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": TIMES.service_stop_s,
            "ProcessType": "Interactive",  # the others are slowed down
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
        }
    )


def manager_of(platform: str) -> Manager:
    """The service manager of a platform. Raises ExoNodeError where there is none."""
    if platform == "darwin":
        return launchd(Path.home(), os.getuid())
    if shutil.which("systemctl") is None:
        raise ExoNodeError(
            "this system has no systemctl; run `exo-node start` by what starts services here"
        )
    import platformdirs

    return systemd(platformdirs.user_config_path())


@service.command()
def install(data_dir: DataDir = None) -> None:
    """Start the node now and at each login. Running it again takes up a changed data folder.

    Settings stand as EXO_… lines in ~/.config/exo-node/environment (Linux). To run on after you
    log out: loginctl enable-linger.
    """
    manager = manager_of(sys.platform)
    folder = client_settings(None, data_dir).data_dir.absolute()
    if fault := _run(manager.look):
        command = " ".join(manager.look)
        raise ExoNodeError(f"nothing was installed: `{command}`: {fault}; {_NO_MANAGER}")
    manager.file.parent.mkdir(parents=True, exist_ok=True)
    if manager.file.exists() and sys.platform == "darwin":
        _ = _run(manager.stop)
    program = [*_program(), "start", "--data-dir", str(folder)]
    replace_private(manager.file, manager.definition(program))
    for command in manager.start:
        if fault := _run(command):
            raise ExoNodeError(f"{manager.file} is written, but `{' '.join(command)}`: {fault}")
    note(f"the node runs as a service, defined in {manager.file}")


@service.command()
def status(as_json: AsJson = False) -> None:
    """Say whether the service is installed and runs. Exit status 1 where it does not run."""
    manager = manager_of(sys.platform)
    installed = manager.file.exists()
    runs = installed and not _run(manager.state)
    if as_json:
        print(json.dumps({"installed": installed, "running": runs, "file": str(manager.file)}))
    elif not installed:
        print(joined(["not installed; `exo-node service install` does it"]))
    else:
        print(f"{'running' if runs else 'installed, not running'}, {manager.file}")
    raise typer.Exit(0 if runs else 1)


@service.command()
def uninstall(yes: Yes = False) -> None:
    """Stop the service and remove it. The data folder stays."""
    manager = manager_of(sys.platform)
    if not manager.file.exists():
        note("it is not installed")
        return
    if not yes:
        confirm("Stop the node and remove its service?")
    fault = _run(manager.stop)
    manager.file.unlink()
    failure = f"; stopping it failed: {fault}" if fault else ""
    note(*f"removed {manager.file}{failure}".splitlines())


def _program() -> list[str]:
    """The command that runs this installation's exo-node."""
    beside = Path(sys.executable).with_name("exo-node")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "exo_node.node.cli.main"]


def _run(command: list[str]) -> str:
    """Runs a command; returns its error, empty if it succeeded."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMES.service_start_s
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        return str(fault)
    if process.returncode == 0:
        return ""
    return process.stderr.strip() or f"exit {process.returncode}"


def _command_line(command: list[str]) -> str:
    """The value of ExecStart: systemd.service(5) expands % everywhere and $ in arguments only."""
    program, *arguments = (_quoted(word) for word in command)
    return " ".join([program, *(word.replace("$", "$$") for word in arguments)])


def _quoted(word: str) -> str:
    for special, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%")):
        word = word.replace(special, escaped)
    return f'"{word}"'
