"""`exo-node doctor`: what is wrong on this machine, and what to do about it."""

import json
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import typer

from ...placement.errors import ExoNodeError
from ..machine.log import escape_controls
from .flags import AsJson, DataDir, LocalPort, client_settings

if TYPE_CHECKING:
    from .client import Endpoint

_LEAST_DISK: Final = 20 * 10**9
_LEAST_MEMORY: Final = 4 * 10**9
_DIAL_S: Final = 3.0
_SILENT_S: Final = 30.0
"""Many heartbeats: who sent none for so long does not reach this node."""
_CLOCKS_S: Final = 5.0
"""Events of nodes whose clocks differ by more are told in another order than they happened."""
_PACKAGES: Final = ("exo-node", "mlx", "mlx-lm", "grpcio", "transformers")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `remedy` is empty where nothing is to be done."""

    what: str
    state: Literal["ok", "warning", "wrong"]
    text: str
    remedy: str = ""


def doctor(port: LocalPort = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Look for what is wrong here: versions, backend, disk, memory, ports, and the other nodes.

    Exit status 1 where something is.
    """
    settings = client_settings(port, data_dir)
    findings = list(look(settings.data_dir, reached(port, data_dir)))
    if as_json:
        print(json.dumps({"findings": [asdict(each) for each in findings]}, indent=2))
    else:
        print("\n".join(told(each) for each in findings))
    raise typer.Exit(1 if any(each.state == "wrong" for each in findings) else 0)


def told(finding: Finding) -> str:
    mark = {"ok": "ok     ", "warning": "look   ", "wrong": "WRONG  "}[finding.state]
    line = f"{mark}{finding.what}: {finding.text}"
    return escape_controls(f"{line}; {finding.remedy}" if finding.remedy else line)


def look(data_dir: Path, endpoint: "Endpoint | ExoNodeError") -> Iterator[Finding]:
    """Everything, the node last: `endpoint` is why there is none where none runs."""
    yield versions()
    yield backend()
    yield memory()
    yield disk("data folder", data_dir)
    if isinstance(endpoint, ExoNodeError):
        yield Finding("node", "warning", endpoint.message)
        yield from ports()
    else:
        yield from node(endpoint)


def versions() -> Finding:
    found = [f"{name} {_version(name)}" for name in _PACKAGES]
    text = f"Python {platform.python_version()}, {', '.join(found)}"
    missing = [name for name in _PACKAGES if _version(name) == "missing"]
    if not missing:
        return Finding("versions", "ok", text)
    return Finding("versions", "wrong", text, f"install {', '.join(missing)} (docs: Installation)")


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def backend() -> Finding:
    from ..machine.settings import check_mlx_extras, installed_distributions

    distributions = installed_distributions()
    try:
        check_mlx_extras(distributions)
    except ExoNodeError as fault:
        return Finding("backend", "wrong", fault.message)
    from ..machine.hardware import guess_backend

    guessed = guess_backend(platform.system(), platform.machine(), distributions)
    if guessed == "cpu" and shutil.which("nvidia-smi"):
        remedy = "install exo-node[cuda] in an environment of its own"
        return Finding("backend", "warning", "cpu, although there is an NVIDIA GPU", remedy)
    return Finding("backend", "ok", f"{guessed} on {platform.system()} {platform.machine()}")


def memory() -> Finding:
    import psutil

    found = psutil.virtual_memory()
    text = f"{found.available / 1e9:.1f} of {found.total / 1e9:.1f} GB are free"
    if found.available < _LEAST_MEMORY:
        return Finding("memory", "warning", text, "end other programs; models have to fit into it")
    return Finding("memory", "ok", text)


def disk(what: str, folder: Path) -> Finding:
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(existing).free
    text = f"{folder}, {free / 1e9:.0f} GB free"
    if folder.exists() and not folder.is_dir():
        return Finding(what, "wrong", f"{folder} is no folder", "move that file away")
    if free < _LEAST_DISK:
        return Finding(what, "warning", text, "models need more; `exo-node models rm` deletes one")
    return Finding(what, "ok", text)


def ports() -> Iterator[Finding]:
    """Whether a node could have its default ports; only where none runs."""
    import socket

    for number, use in ((52415, "HTTP"), (52416, "nodes"), (52417, "joining")):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", number))
            except OSError:
                remedy = "end what has it, or choose others with --port and --grpc-port"
                yield Finding("port", "warning", f"{number} ({use}) is in use", remedy)
            else:
                yield Finding("port", "ok", f"{number} ({use}) is free")


def node(endpoint: "Endpoint") -> Iterator[Finding]:
    """What the running node says of itself and of the others."""
    from .client import call
    from .output import offline_words

    try:
        cluster = call(endpoint, "/v1/cluster")
        joining = call(endpoint, "/v1/join/requests")
    except ExoNodeError as fault:
        yield Finding("node", "wrong", fault.message, "see its log; `exo-node stop`, then start")
        return
    members: list[dict[str, Any]] = cluster["nodes"]
    nobody: dict[str, Any] = {}
    me = next((each for each in members if each.get("self")), nobody)
    yield Finding("node", "ok", f"{me.get('name')} answers on http://{endpoint}")
    if trouble := cluster.get("trouble"):
        yield Finding("node", "wrong", str(trouble))
    if setting := cluster.get("offline"):
        yield Finding(
            "downloads", "warning", offline_words(setting), f"unset {setting} to download"
        )
    if cluster.get("head") is None:
        yield Finding("head", "wrong", "none is elected", "more than half of the nodes must answer")
    if joining.get("open"):
        remedy = "start without --open outside a lab"
        yield Finding("joining", "warning", "nodes join without approval", remedy)
    for asking in joining.get("data", []):
        remedy = "`exo-node approve DIGITS` lets it in"
        yield Finding("joining", "warning", f"{asking.get('name')} asks to join", remedy)
    for member in members:
        if not member.get("self"):
            yield _member(member, me)
    if len(members) > 1:
        yield from _reach(endpoint, me)


def _reach(endpoint: "Endpoint", me: Mapping[str, Any]) -> Iterator[Finding]:
    """Both ways, by multicast, and the clocks."""
    from .client import call

    try:
        told = call(endpoint, "/v1/cluster/reach")
    except ExoNodeError as fault:
        yield Finding("reach", "warning", fault.message)
        return
    if told["mdns"] == "failed":
        remedy = "let UDP port 5353 through the firewall; until then others need --peer"
        yield Finding("multicast", "warning", str(told["mdns_failure"]), remedy)
    for member in told["members"]:
        yield _way_back(member, me)
        yield _clock(member)
        if told["mdns"] == "works":
            yield _multicast(member)


def _way_back(member: Mapping[str, Any], me: Mapping[str, Any]) -> Finding:
    """Whether the member reaches this node; the other direction was dialled."""
    name, port = member.get("name"), me.get("port")
    where = f"this node at {me.get('host')}:{port}"
    heard = member.get("heard_ago_s")
    if heard is not None and heard < _SILENT_S:
        return Finding("way back", "ok", f"{name} reaches {where}")
    remedy = f"let TCP port {port} through this machine's firewall ({_firewall(port)})"
    return Finding("way back", "wrong", f"{name} does not reach {where}", remedy)


def _firewall(port: object) -> str:
    if platform.system() == "Darwin":
        return "System Settings, Network, Firewall, Options: allow Python"
    return f"with ufw: `sudo ufw allow {port}/tcp`"


def _clock(member: Mapping[str, Any]) -> Finding:
    name, ahead = member.get("name"), member.get("clock_ahead_s")
    if ahead is None:
        return Finding("clock", "warning", f"{name} has not told its time", "ask again in a minute")
    side = "ahead of" if ahead > 0 else "behind"
    text = f"{name} is {abs(ahead):.2f} s {side} this node, ±{member['clock_within_s']:.2f} s"
    if abs(ahead) - member["clock_within_s"] <= _CLOCKS_S:
        return Finding("clock", "ok", text)
    remedy = "let both set their time: `timedatectl set-ntp true`, or System Settings on a Mac"
    return Finding("clock", "warning", text, remedy)


def _multicast(member: Mapping[str, Any]) -> Finding:
    if member.get("mdns"):
        return Finding("multicast", "ok", f"{member.get('name')} answers by mDNS")
    remedy = (
        f"let UDP port 5353 through both firewalls and turn off the access point's client "
        f"isolation, or start this node with --peer {member.get('address')}"
    )
    text = f"{member.get('name')} does not answer by mDNS"
    return Finding("multicast", "warning", text, remedy)


def _member(member: Mapping[str, Any], me: Mapping[str, Any]) -> Finding:
    import socket

    name, status = str(member.get("name")), str(member.get("status"))
    where = f"{member.get('host')}:{member.get('port')}"
    if member.get("version") != me.get("version"):
        text = f"{name} has version {member.get('version')}, this node {me.get('version')}"
        return Finding("member", "wrong", text, "install the same version on both")
    begun = time.monotonic()
    try:
        socket.create_connection((str(member["host"]), int(member["port"])), _DIAL_S).close()
    except OSError as fault:
        remedy = f"start it, or let port {member.get('port')} through its firewall"
        return Finding("member", "wrong", f"{name} at {where}, {status}: {fault}", remedy)
    took = (time.monotonic() - begun) * 1000
    text = f"{name} at {where}, {status}, connected in {took:.1f} ms"
    if status != "alive":
        return Finding("member", "warning", text, "its node does not answer; see its log")
    return Finding("member", "ok", text)


def reached(port: str | None, data_dir: str | None) -> "Endpoint | ExoNodeError":
    """The node, or why there is none to ask."""
    from .client import locate

    try:
        return locate(client_settings(port, data_dir))
    except ExoNodeError as fault:
        return fault
