"""`exo-node service`: the node as this user's service, by systemd on Linux and launchd on macOS."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from ...placement.errors import ExoNodeError
from ..machine.private_files import replace_private
from .client import client_settings
from .flags import AsJson, DataDir, Yes, group, switch
from .output import confirm, joined, note
from .times import TIMES

UNIT: Final = "exo-node.service"
LABEL: Final = "exo-node.node"
DAEMONS: Final = Path("/Library/LaunchDaemons")

_NO_MANAGER: Final = (
    "your services run while you are logged in on the machine itself; on Linux `sudo loginctl "
    "enable-linger $USER` starts them without that: log in again then, and repeat the command"
)

_REFUSED: Final = (
    "its log is ~/Library/Logs/exo-node.log; where macOS keeps it from starting: System Settings > "
    "General > Login Items & Extensions, allow exo-node (or python) in the background"
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
    """Fails while the service is not loaded, or on Linux while it does not run."""
    fault: Callable[[str], str] = lambda _: ""
    """Why a service does not run, from the output of `state`; empty where it runs."""
    other: Path | None = None
    """The file of the other kind of service, which would run the same node a second time."""
    is_ended_late: bool = False
    """`stop` returns before the service has ended, and `start` fails until it has."""


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


def launchd(home: Path, uid: int, system_user: str = "") -> Manager:
    """The manager of macOS, after launchd.plist(5) and launchctl(1); it was run on no Mac.

    An agent of the user `uid`, which runs while they are logged in and needs macOS's permission for
    the local network; or the daemon of `system_user`, which runs from boot on and needs none.
    """
    domain = "system" if system_user else f"gui/{uid}"
    files = [each / f"{LABEL}.plist" for each in (home / "Library" / "LaunchAgents", DAEMONS)]
    other, file = files if system_user else reversed(files)
    label = f"{domain}/{LABEL}"
    return Manager(
        file=file,
        definition=partial(_job, home, system_user),
        look=["launchctl", "print", domain],
        # One that was switched off in System Settings is loaded only after `enable`.
        start=[["launchctl", "enable", label], ["launchctl", "bootstrap", domain, str(file)]],
        stop=["launchctl", "bootout", label],
        state=["launchctl", "print", label],
        fault=_job_fault,
        other=other,
        is_ended_late=True,
    )


def _job(home: Path, system_user: str, command: list[str]) -> bytes:
    import plistlib

    logs, settings = home / "Library" / "Logs", home / ".config" / "exo-node" / "environment"
    # launchd neither reads settings from a file nor rotates a log: the node does both.
    own = ["--environment-file", str(settings), "--log-file", str(logs / "exo-node.log")]
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": [*command, *own],
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": TIMES.service_stop_s,
            "ProcessType": "Interactive",  # the others are slowed down
            "StandardErrorPath": str(logs / "exo-node.err"),  # what ends the process
            **(
                {"UserName": system_user, "EnvironmentVariables": {"HOME": str(home)}}
                if system_user
                else {}
            ),
        }
    )


def _job_fault(text: str) -> str:
    """Why a job does not run, from the output of `launchctl print`."""
    # The first of each: what follows are the states of what the job uses.
    facts = dict(reversed(re.findall(r"^\s*(state|last exit code) = (.*)$", text, re.MULTILINE)))
    if facts.get("state") == "running":
        return ""
    code = facts.get("last exit code", "")
    ended = re.match("-?[0-9]", code)  # "(never exited)" otherwise
    return f"it ended with exit code {code}" if ended else f"its state is {facts.get('state')}"


def manager_of(platform: str, *, system: bool = False) -> Manager:
    """The service manager of a platform; `system`: for a service that needs no login.

    Raises ExoNodeError where there is none.
    """
    if platform == "darwin":
        return _daemon() if system else launchd(Path.home(), os.getuid())
    if system:
        raise ExoNodeError(
            "--system is for macOS; here `loginctl enable-linger` runs your service from boot on"
        )
    if shutil.which("systemctl") is None:
        raise ExoNodeError(
            "this system has no systemctl; run `exo-node start` by what starts services here"
        )
    import platformdirs

    return systemd(platformdirs.user_config_path())


def _daemon() -> Manager:
    """The daemon of the user who calls sudo: models and keys stay theirs."""
    import pwd

    from ..machine.settings import sudo_user

    user = sudo_user()
    if os.geteuid() != 0 or user in ("", "root"):
        raise ExoNodeError("only root installs a daemon, for the user who calls it: use `sudo`")
    return launchd(Path(pwd.getpwnam(user).pw_dir), 0, user)


_System = Annotated[
    bool, switch("macOS: a daemon, which needs no login and no permission.", "--system")
]


@service.command()
def install(data_dir: DataDir = None, system: _System = False) -> None:
    """Start the node now and at each login. Running it again takes up a changed data folder.

    Settings stand as EXO_… lines in ~/.config/exo-node/environment. To run on after you log out:
    loginctl enable-linger on Linux, `sudo exo-node service install --system` on macOS.
    """
    manager = manager_of(sys.platform, system=system)
    folder = None if system and data_dir is None else client_settings(None, data_dir).data_dir
    if manager.other is not None and manager.other.exists():
        way = (
            "`exo-node service uninstall`"
            if system
            else "`sudo exo-node service uninstall --system`"
        )
        raise ExoNodeError(f"nothing was installed: {manager.other} runs this node; {way} first")
    _, fault = _run(manager.look)
    if fault:
        command = " ".join(manager.look)
        raise ExoNodeError(f"nothing was installed: `{command}`: {fault}; {_NO_MANAGER}")
    manager.file.parent.mkdir(parents=True, exist_ok=True)
    if manager.is_ended_late:
        _end(manager)
    where = [] if folder is None else ["--data-dir", str(folder)]
    replace_private(manager.file, manager.definition([*_program(), "start", *where]))
    for command in manager.start:
        if fault := _started(command, again=manager.is_ended_late):
            raise ExoNodeError(f"{manager.file} is written, but `{' '.join(command)}`: {fault}")
    note(f"the node runs as a service, defined in {manager.file}")


@service.command()
def status(as_json: AsJson = False, system: _System = False) -> None:
    """Say whether the service is installed and runs. Exit status 1 where it does not run."""
    manager = manager_of(sys.platform, system=system)
    installed = manager.file.exists()
    output, fault = _run(manager.state) if installed else ("", "it is not installed")
    why = "" if fault else manager.fault(output)
    runs = not fault and not why
    if as_json:
        report = {"installed": installed, "running": runs, "file": str(manager.file)}
        print(json.dumps(report | ({"reason": why} if why else {})))
    elif not installed:
        print(joined(["not installed; `exo-node service install` does it"]))
    else:
        stopped = f"installed, not running{f' ({why})' if why else ''}"
        print(f"{'running' if runs else stopped}, {manager.file}")
        if not runs and sys.platform == "darwin":
            note(_REFUSED)
    raise typer.Exit(0 if runs else 1)


@service.command()
def uninstall(yes: Yes = False, system: _System = False) -> None:
    """Stop the service and remove it. The data folder stays."""
    manager = manager_of(sys.platform, system=system)
    if not manager.file.exists():
        note("it is not installed")
        return
    if not yes:
        confirm("Stop the node and remove its service?")
    _, fault = _run(manager.stop)
    manager.file.unlink()
    failure = f"; stopping it failed: {fault}" if fault else ""
    note(*f"removed {manager.file}{failure}".splitlines())


def _end(manager: Manager) -> None:
    """Ends a service that is loaded, and waits until it is gone: answers may take minutes."""
    if (fault := _run(manager.stop)[1]) and "36:" not in fault:
        return  # it was not loaded; 36 is "Operation now in progress"
    until = time.monotonic() + TIMES.service_stop_s
    while not _run(manager.state)[1] and time.monotonic() < until:
        time.sleep(TIMES.service_look_s)


def _started(command: list[str], *, again: bool) -> str:
    """The error of a command that starts a service, empty if it succeeded.

    `again`: launchd may answer "5: Input/output error" for a moment after a service has gone.
    """
    until = time.monotonic() + TIMES.service_settle_s
    while (fault := _run(command)[1]) and again and time.monotonic() < until:
        time.sleep(TIMES.service_look_s)
    return fault


def _program() -> list[str]:
    beside = Path(sys.executable).with_name("exo-node")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "exo_node.node.cli.main"]


def _run(command: list[str]) -> tuple[str, str]:
    """The output of a command, and its error, which is empty if it succeeded."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMES.service_start_s
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        return "", str(fault)
    fault = process.stderr.strip() or f"exit {process.returncode}"
    return process.stdout, fault if process.returncode else ""


def _command_line(command: list[str]) -> str:
    """The value of ExecStart: systemd.service(5) expands % everywhere and $ in arguments only."""
    program, *arguments = (_quoted(word) for word in command)
    return " ".join([program, *(word.replace("$", "$$") for word in arguments)])


def _quoted(word: str) -> str:
    for special, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%")):
        word = word.replace(special, escaped)
    return f'"{word}"'
