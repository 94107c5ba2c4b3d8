"""Nodes that give each other models' files: real services and channels, without whole nodes."""

import json
import struct
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from exo_node.node.machine.events import EventLog
from exo_node.node.machine.timing import LAN, Timing
from exo_node.node.rpc.channels import Channels
from exo_node.node.rpc.control_server import PeersOnly
from exo_node.node.rpc.model_files import FileSource, ModelFilesClient, ModelFilesService, Range
from exo_node.node.store.fetching import ModelFetcher
from exo_node.node.store.library import ModelLibrary
from exo_node.node.store.sharing import SharedModels
from exo_node.node.store.sources import ModelSource
from exo_node.node.store.transfers import Progress
from exo_node.node.trust.certificates import node_credentials, server_credentials
from exo_node.node.trust.keys import ClusterKey, load_or_create_identity
from exo_node.placement.ids import ModelId
from exo_node.proto import peer_pb2 as pb
from exo_node.proto import peer_pb2_grpc

KEY = ClusterKey(b"0123456789abcdefghij")
MODEL = ModelId("maker/tiny")
LAYERS = 4
SECOND = "model-00002-of-00003.safetensors"
_WIDTH = 64


def write_model(folder: Path, rows: int = 64) -> Path:
    """A llama of 4 layers in 3 weight files: two layers each, and what is in no layer."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "hidden_size": _WIDTH,
        "num_hidden_layers": LAYERS,
        "intermediate_size": _WIDTH,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 64,
    }
    _ = (folder / "config.json").write_text(json.dumps(config))
    _ = (folder / "tokenizer.json").write_text("{}")
    files = {
        "model-00001-of-00003.safetensors": [f"model.layers.{n}.x.weight" for n in (0, 1)],
        "model-00002-of-00003.safetensors": [f"model.layers.{n}.x.weight" for n in (2, 3)],
        "model-00003-of-00003.safetensors": ["model.embed_tokens.weight", "model.norm.weight"],
    }
    for name, tensors in files.items():
        _ = (folder / name).write_bytes(safetensors(tensors, rows))
    index = {"weight_map": {t: name for name, tensors in files.items() for t in tensors}}
    _ = (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def silent(_step: str, _news: Progress) -> None:
    """Ignores the progress of a copy."""


def safetensors(names: Iterable[str], rows: int) -> bytes:
    size = rows * _WIDTH * 2
    header = {
        name: {"dtype": "BF16", "shape": [rows, _WIDTH], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    data = b"".join(bytes([65 + len(name) % 26]) * size for name in header)
    return struct.pack("<Q", len(text)) + text + data


def stage(first: int, end: int, checkpoint_sha256: str = "") -> pb.StageSpec:
    whole = (first, end) == (0, LAYERS)
    return pb.StageSpec(
        model=MODEL,
        stage=0 if first == 0 else 1,
        num_stages=1 if whole else 2,
        first_layer=first,
        end_layer=end,
        num_layers=LAYERS,
        checkpoint_sha256=checkpoint_sha256,
    )


@dataclass
class Giver:
    """A node that has models; `wrap` puts something between its files and the peer."""

    root: Path
    wrap: Callable[[SharedModels], FileSource] = lambda files: files
    busy: Callable[[], bool] = lambda: False
    slept: list[float] = field(default_factory=list[float])

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@asynccontextmanager
async def giving(giver: Giver, name: str = "one") -> AsyncGenerator[ModelSource]:
    identity = load_or_create_identity(giver.root / name)
    files = SharedModels(ModelLibrary([giver.root / "models"], offline=True))
    service = ModelFilesService(giver.wrap(files), giver.busy, giver.sleep)
    server = grpc.aio.server(interceptors=(PeersOnly(),))
    peer_pb2_grpc.add_ModelFilesServicer_to_server(service, server)
    credentials = server_credentials(node_credentials(identity, KEY))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield ModelSource(identity.node, name, f"127.0.0.1:{port}")
    finally:
        await server.stop(grace=0)


@dataclass
class Taker:
    """A node that has no model."""

    root: Path
    events: EventLog = field(default_factory=EventLog)
    progress: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def library(self) -> ModelLibrary:
        return ModelLibrary([self.models], offline=True)

    def events_of(self, kind: str) -> list[str]:
        return [event.text for event in self.events.entries() if event.kind == kind]


@asynccontextmanager
async def taking(
    taker: Taker, *sources: ModelSource, timing: Timing = LAN
) -> AsyncGenerator[ModelFetcher]:
    identity = load_or_create_identity(taker.root / "taker")
    channels = Channels(node_credentials(identity, KEY))
    client = ModelFilesClient(channels, timing)
    try:
        yield ModelFetcher(
            taker.library, client, lambda _: sources, taker.events, taker.models, may_download=False
        )
    finally:
        await channels.close()


class Watched:
    """A `FileSource` that records its reads and may spoil or end them."""

    def __init__(self, files: SharedModels) -> None:
        self.files = files
        self.reads: list[tuple[str, int]] = []
        self.spoil = ""
        self.chunks = 1 << 30
        self.drips = False
        """Whether SECOND is sent byte by byte."""

    def offer(self, model: str) -> pb.ModelOffer:
        return self.files.offer(model)

    def digest(self, model: str, path: str) -> str:
        return self.files.digest(model, path)

    def open(self, request: pb.FileRequest) -> Range:
        self.reads.append((request.path, request.start))
        return _Spoiled(self.files.open(request), self, request.path)


class _Spoiled:
    def __init__(self, inner: Range, owner: Watched, path: str) -> None:
        self._inner = inner
        self._owner = owner
        self._path = path
        self._rest = b""

    def read(self) -> bytes:
        if self._owner.drips and self._path == SECOND:
            data = self._rest or self._inner.read()
            self._rest = data[1:]
            return data[:1]
        if self._owner.chunks == 0:
            raise OSError(5, "the disk is gone")
        data = self._inner.read()
        if data and self._path == SECOND:
            self._owner.chunks -= 1
        if self._path == self._owner.spoil:
            return data[:-1] + bytes([data[-1] ^ 1]) if data else data
        return data

    def close(self) -> None:
        self._inner.close()


def giver(tmp_path: Path, name: str = "one", rows: int = 64) -> Giver:
    node = Giver(tmp_path / name)
    _ = write_model(node.root / "models" / MODEL, rows)
    return node


def watch(node: Giver) -> list[Watched]:
    """One source, which the giver's service reads from once it runs."""
    sources: list[Watched] = []

    def wrap(files: SharedModels) -> FileSource:
        sources.append(Watched(files))
        return sources[0]

    node.wrap = wrap
    return sources


WHOLE = stage(0, LAYERS)
