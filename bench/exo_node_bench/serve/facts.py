"""Facts about the machines, models and servers of a bench, without any name or address."""

import ipaddress
import os
import platform
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Final
from urllib.parse import quote, urlsplit

import httpx2
import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from exo_node.node.machine.hardware import cpu_name

from .result import ClientMachine, Model, ServerFacts, StageNode
from .server import Server, UnusableServer, fetch

_PACKAGES: Final = ("exo-node", "mlx", "mlx-lm")
_CLASSES_GB: Final = (
    *(1, 2, 4, 6, 8, 10, 12, 16, 18, 20, 24, 32, 36, 40, 48, 64, 80, 96, 128, 141, 192, 256),
    *(384, 512, 768, 1024, 1536, 2048),
)
"""Memories that machines and GPUs are sold with. What they report is a little less."""
_LONGEST: Final = 80
_PATH: Final = re.compile(r"^[/~.]|^[A-Za-z]:|\\|/.*/")
"""A model's id that is a path; OWNER/NAME is none."""

_Text = Annotated[str, Field(max_length=_LONGEST, pattern=r"^[\w .,+()@/:-]*$")]
_Count = Annotated[int, Field(ge=0, le=1 << 50)]


class _Reply(BaseModel):
    """A part of a node's reply; other fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Entry(_Reply):
    quantization: _Count | None = None
    format: _Text | None = None
    context_length: _Count | None = None
    parameters: _Count | None = None


class _Stage(_Reply):
    node: str
    layers: tuple[int, int] | None = None


class _Placement(_Reply):
    model: str
    status: str
    dtype: _Text | None = None
    context_length: _Count | None = None
    stages: list[_Stage]


class _Placements(_Reply):
    data: list[_Placement]


class _Member(_Reply):
    id: str
    chip: _Text
    backend: _Text | None = None
    memory_bytes: _Count


class _Cluster(_Reply):
    version: _Text
    nodes: list[_Member]


def client_facts() -> ClientMachine:
    """This machine and installation."""
    versions = {name: _version(name) for name in _PACKAGES}
    return ClientMachine(
        chip=cpu_name()[:_LONGEST],
        memory_gb=memory_class(psutil.virtual_memory().total),
        system=system_text(platform.system(), platform.release(), platform.mac_ver()[0]),
        cores=os.cpu_count() or 1,
        versions=versions | {"Python": platform.python_version()},
    )


def system_text(system: str, release: str, mac: str) -> str:
    """`macOS 15.5 arm64` or `Linux 6.8 x86_64`. The rest of a kernel's release may name a person
    or a machine."""
    number = re.match(r"\d+(\.\d+)?", release)
    text = f"macOS {mac}" if mac else f"{system} {number[0] if number else ''}".strip()
    return f"{text} {platform.machine()}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def memory_class(total: int) -> int:
    """The memory in GB that a machine which reports `total` bytes is sold with."""
    at_least = total / 2**30
    return next((each for each in _CLASSES_GB if each >= at_least), round(at_least))


def model_label(model: str) -> str:
    """A model's id; of a path the last part."""
    text = re.split(r"[/\\]", model.rstrip("/\\"))[-1] if _PATH.search(model) else model
    return "".join(c if c.isprintable() else "?" for c in text)[:_LONGEST]


def is_loopback(url: str) -> bool:
    """Whether a server's address is this machine's own."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def describe(client: httpx2.AsyncClient, server: Server) -> ServerFacts:
    """The facts that a server gives: those of exo-node's API, or its model's id only."""
    bare = ServerFacts(
        name=server.name,
        software=None,
        same_machine=is_loopback(server.url),
        model=Model(id=model_label(server.model)),
        nodes=(),
        drafting=(),
    )
    try:
        cluster = _Cluster.model_validate(await fetch(client, server, "/v1/cluster"))
        path = f"/v1/models/{quote(server.model, safe='/')}"
        entry = _Entry.model_validate(await fetch(client, server, path))
        listing = await fetch(client, server, "/v1/placements")
        placements = _Placements.model_validate(listing).data
    except (UnusableServer, ValidationError):  # another server, or one that tells strangers less
        return bare
    serving = [each for each in placements if each.model == server.model]
    ready = next((each for each in serving if each.status == "ready"), None)
    return bare.model_copy(
        update={
            "software": f"exo-node {cluster.version}",
            "model": _model(bare.model, entry, ready),
            "nodes": () if ready is None else tuple(_nodes_of(ready.stages, cluster.nodes)),
            "replicas": sum(each.status == "ready" for each in serving) or None,
        }
    )


def _model(bare: Model, entry: _Entry, placement: _Placement | None) -> Model:
    context = placement.context_length if placement else None
    return Model(
        id=bare.id,
        quantization_bits=entry.quantization,
        format=entry.format,
        dtype=placement.dtype if placement else None,
        context_length=context or entry.context_length,
        parameters=entry.parameters,
    )


def _nodes_of(stages: Iterable[_Stage], members: Iterable[_Member]) -> Iterable[StageNode]:
    by_id = {member.id: member for member in members}
    for stage in stages:
        member = by_id.get(stage.node)
        yield StageNode(
            chip=member.chip if member else "unknown",
            backend=member.backend if member else None,
            models_gb=round(member.memory_bytes / 1e9, 1) if member else None,
            layers=stage.layers[1] - stage.layers[0] if stage.layers else None,
        )
