"""`exo-node doctor`: what is wrong on this machine, and what to do about it."""

import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

import typer

from ...placement.errors import ExoNodeError
from ...shard.checkpoint.vision import LIGHT_WAY, has_extra
from ..machine import local_network
from ..machine.interfaces import own_interfaces
from .client import ApiEndpoint, call, client_settings, connect
from .failures import with_remedy
from .flags import AsJson, DataDir, LocalPort
from .join import not_asked_text
from .output import Json, joined, print_json
from .status import offline_text
from .times import TIMES

_LEAST_DISK: Final = 20 * 10**9
_LEAST_MEMORY: Final = 4 * 10**9
_ENCODERS: Final = "BERT, RoBERTa, XLM-R, ModernBERT"
_CLASSES: Final = "the models that only mlx-vlm has"
_PACKAGES: Final = ("exo-node", "mlx", "mlx-lm", "grpcio", "transformers")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `remedy` is empty where nothing is to be done."""

    what: str
    state: Literal["ok", "warning", "wrong"]
    text: str
    remedy: str = ""


def doctor(port: LocalPort = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Look for what is wrong here.

    Versions, backend, disk, memory and the other nodes are looked at. Exit status 1 where
    something is.
    """
    settings = client_settings(port, data_dir)
    findings = list(check_all(settings.data_dir, endpoint_or_fault(port, data_dir)))
    if as_json:
        print_json({"findings": [asdict(each) for each in findings]})
    else:
        print(joined(_line(each) for each in findings))
    raise typer.Exit(1 if any(each.state == "wrong" for each in findings) else 0)


def _line(finding: Finding) -> str:
    mark = {"ok": "ok     ", "warning": "look   ", "wrong": "WRONG  "}[finding.state]
    return with_remedy(f"{mark}{finding.what}: {finding.text}", finding.remedy)


def check_all(data_dir: Path, endpoint: ApiEndpoint | ExoNodeError) -> Iterator[Finding]:
    """All checks, the node's last; `endpoint` is the error where no node runs."""
    yield _versions()
    yield _backend()
    yield vision_extra()
    yield _memory()
    yield disk("data folder", data_dir)
    if blocked := local_network.refusal(own_interfaces()):
        yield Finding("network", "wrong", blocked, local_network.REMEDY)
    if isinstance(endpoint, ExoNodeError):
        yield Finding("node", "warning", endpoint.message)
    else:
        yield from _node(endpoint)


def _versions() -> Finding:
    versions = {name: _version(name) for name in _PACKAGES}
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    text = f"Python {platform.python_version()}, {packages}"
    missing = [name for name, version in versions.items() if version == "missing"]
    if not missing:
        return Finding("versions", "ok", text)
    return Finding("versions", "wrong", text, f"install {', '.join(missing)} (docs: Installation)")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _backend() -> Finding:
    from ..machine.settings import check_mlx_extras, installed_distributions

    distributions = installed_distributions()
    try:
        check_mlx_extras(distributions, sys.platform)
    except ExoNodeError as fault:
        return Finding("backend", "wrong", fault.message)
    from ..machine.hardware import guess_backend

    guessed = guess_backend(sys.platform, platform.machine(), distributions)
    if guessed == "cpu" and shutil.which("nvidia-smi"):
        remedy = "install exo-node[cuda] in an environment of its own"
        return Finding("backend", "warning", "cpu, although there is an NVIDIA GPU", remedy)
    return Finding("backend", "ok", f"{guessed} on {platform.system()} {platform.machine()}")


def vision_extra() -> Finding:
    """Whether images, encoders and the models that mlx-vlm has are read here; the others need no
    extra."""
    if not has_extra():
        text = f"models read no images; encoders ({_ENCODERS}) and {_CLASSES} are not loaded"
        remedy = f"`pip install 'exo-node[vision]'`, or 667 MB less by `{LIGHT_WAY}`, adds them"
        return Finding("vision", "ok", text, remedy)
    versions = f"mlx-vlm {_version('mlx-vlm')}, Pillow {_version('pillow')}"
    return Finding("vision", "ok", f"for images, encoders ({_ENCODERS}) and {_CLASSES}: {versions}")


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB are free"
    if memory.available < _LEAST_MEMORY:
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


def _node(endpoint: ApiEndpoint) -> Iterator[Finding]:
    """The running node's view of itself and of the other members."""
    try:
        cluster = call(endpoint, "/v1/cluster")
        joining = call(endpoint, "/v1/join/requests")
    except ExoNodeError as fault:
        yield Finding("node", "wrong", fault.message, "see its log; `exo-node stop`, then start")
        return
    members: list[dict[str, Any]] = cluster["nodes"]
    unknown: dict[str, Any] = {}
    me = next((each for each in members if each.get("self")), unknown)
    yield Finding("node", "ok", f"{me.get('name')} answers on http://{endpoint}")
    if closed := joining.get("not_asked"):
        yield Finding("joining", "warning", not_asked_text(closed))
    if trouble := cluster.get("trouble"):
        yield Finding("node", "wrong", str(trouble))
    if setting := cluster.get("offline"):
        remedy = f"unset {setting} to download"
        yield Finding("downloads", "warning", offline_text(setting), remedy)
    if cluster.get("head") is None:
        yield Finding("head", "wrong", "none is elected", "more than half of the nodes must answer")
    for asking in joining.get("data", []):
        remedy = "`exo-node approve DIGITS` lets it in"
        yield Finding("joining", "warning", f"{asking.get('name')} asks to join", remedy)
    for member in members:
        if not member.get("self"):
            yield _member(member, me)
    if len(members) > 1:
        yield from _reach(endpoint, me)


def _reach(endpoint: ApiEndpoint, me: Json) -> Iterator[Finding]:
    """Whether members reach this node, by multicast too."""
    try:
        reach = call(endpoint, "/v1/cluster/reach")
    except ExoNodeError as fault:
        yield Finding("reach", "warning", fault.message)
        return
    if reach["mdns"] == "failed":
        remedy = "let UDP port 5353 through the firewall; until then others need --peer"
        yield Finding("multicast", "warning", str(reach["mdns_failure"]), remedy)
    for member in reach["members"]:
        yield _way_back(member, me)
        if reach["mdns"] == "works":
            yield _multicast(member)


def _way_back(member: Json, me: Json) -> Finding:
    """Whether the member reaches this node; `_member` checks the other direction."""
    name, port = member.get("name"), me.get("port")
    where = f"this node at {me.get('host')}:{port}"
    heartbeat_age_s = member.get("heard_ago_s")
    if heartbeat_age_s is not None and heartbeat_age_s < TIMES.silent_s:
        return Finding("way back", "ok", f"{name} reaches {where}")
    remedy = f"let TCP port {port} through this machine's firewall ({_firewall(port)})"
    return Finding("way back", "wrong", f"{name} does not reach {where}", remedy)


def _firewall(port: object) -> str:
    if platform.system() == "Darwin":
        return "System Settings, Network, Firewall, Options: allow Python"
    return f"with ufw: `sudo ufw allow {port}/tcp`"


def _multicast(member: Json) -> Finding:
    if member.get("mdns"):
        return Finding("multicast", "ok", f"{member.get('name')} answers by mDNS")
    remedy = (
        f"let UDP port 5353 through both firewalls and turn off the access point's client "
        f"isolation, or start this node with --peer {member.get('address')}"
    )
    text = f"{member.get('name')} does not answer by mDNS"
    return Finding("multicast", "warning", text, remedy)


def _member(member: Json, me: Json) -> Finding:
    name, status = str(member.get("name")), str(member.get("status"))
    where = f"{member.get('host')}:{member.get('port')}"
    if member.get("version") != me.get("version"):
        text = f"{name} has version {member.get('version')}, this node {me.get('version')}"
        return Finding("member", "wrong", text, "install the same version on both")
    started_at = time.monotonic()
    try:
        socket.create_connection((str(member["host"]), int(member["port"])), TIMES.dial_s).close()
    except OSError as fault:
        remedy = f"start it, or let port {member.get('port')} through its firewall"
        return Finding("member", "wrong", f"{name} at {where}, {status}: {fault}", remedy)
    elapsed_ms = (time.monotonic() - started_at) * 1000
    text = f"{name} at {where}, {status}, connected in {elapsed_ms:.1f} ms"
    if status != "alive":
        return Finding("member", "warning", text, "its node does not answer; see its log")
    return Finding("member", "ok", text)


def endpoint_or_fault(port: str | None, data_dir: str | None) -> ApiEndpoint | ExoNodeError:
    """The node, or why there is none to ask."""
    try:
        return connect(port, data_dir)
    except ExoNodeError as fault:
        return fault
