"""Real runner processes on 127.0.0.1, under a cluster key of their own.

The coroutines of one module's tests run in one `asyncio.Runner`, so that processes which several
tests share belong to one loop.
"""

import asyncio
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import kept_profiles
from engines import DEMO, message, spec

from exo_node.node.machine.settings import runner_environment
from exo_node.node.machine.timing import LAN
from exo_node.node.rpc.channels import Channels
from exo_node.node.runners.runner_client import Endpoint, RunnerClient
from exo_node.node.runners.runner_process import RunnerHost, RunnerProcess
from exo_node.node.trust.certificates import runner_credentials
from exo_node.node.trust.keys import ClusterKey
from exo_node.placement.ids import NodeId, PlacementId, runner_name
from exo_node.proto import peer_pb2 as pb

KEY = ClusterKey(b"0123456789abcdefghij")
NODE = NodeId("a" * 20)
_NUMBERS = count(1)
WITHIN_S = 180.0
"""A limit for starts and answers: a start took a minute beside a dozen busy processes."""


async def eventually(look: Callable[[], bool], within_s: float) -> float:
    """The seconds until `look()` is true; fails the test after `within_s`."""
    started_at = time.monotonic()
    while not look():
        assert time.monotonic() - started_at < within_s, f"not within {within_s} s"
        await asyncio.sleep(0.01)
    return time.monotonic() - started_at


async def on_answer(_process: RunnerProcess, _state: pb.RunnerState) -> None:
    """Learns nothing from an answer that ended."""


def runner_host(key: ClusterKey = KEY) -> RunnerHost:
    return RunnerHost(
        node=NODE,
        host="127.0.0.1",
        credentials=lambda: runner_credentials(NODE, key),
        environment=runner_environment(os.environ),
        timing=LAN,
    )


@dataclass(slots=True)
class Placement:
    """The runners of one placement, started and connected as a head does it."""

    processes: list[RunnerProcess]
    endpoints: list[Endpoint]
    channels: Channels
    exited: list[RunnerProcess] = field(default_factory=list[RunnerProcess])
    connections: int = 0

    @property
    def client(self) -> RunnerClient:
        return RunnerClient(self.channels, LAN)

    @property
    def name(self) -> PlacementId:
        return PlacementId(self.processes[0].spec.placement)

    async def restart(self, stage: int) -> None:
        """A fresh process in the place of one that ended, connected like it."""
        ended = self.processes[stage]
        process = self.processes[stage] = RunnerProcess(
            ended.spec, self.exited.append, on_answer, LAN
        )
        await ended.stop()
        self.endpoints[stage] = Endpoint(NODE, await process.start(runner_host(), lambda _: None))
        await self.connect()

    async def connect(self) -> None:
        """Connects each stage to the next one, and the last to the generator."""
        if len(self.endpoints) > 1:
            self.connections += 1
            epoch = pb.Epoch(number=self.connections)
            for number, stage in enumerate(self.endpoints):
                await self.client.enter(stage, self.name, number, epoch)
            for stage, following in pairwise([*self.endpoints, self.endpoints[0]]):
                await self.client.connect(stage, following, self.name, epoch)

    def request(self, prompt: str | Sequence[int], **changes: Any) -> pb.GenerateRequest:
        """Greedy and without drafts; `prompt` is ids, or one message's text."""
        fields: dict[str, Any] = {
            "placement": self.name,
            "request": f"r{next(_NUMBERS)}",
            "attempt": 1,
            "sampling": pb.Sampling(top_p=1.0),
            "drafting_reason": "a test",
        }
        if isinstance(prompt, str) and "token_ids" not in changes:
            chat = json.dumps([{"role": "user", "content": prompt}])
            fields["messages"] = pb.Messages(json=chat)
        elif not isinstance(prompt, str):
            fields["token_ids"] = pb.TokenIds(ids=prompt)
        return message(**(fields | changes))

    def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateEvent, None]:
        return self.client.generate(self.endpoints[0], request)

    async def answer(self, prompt: str | Sequence[int], **changes: Any) -> "WireAnswer":
        got = WireAnswer()
        async for event in self.generate(self.request(prompt, **changes)):
            got.add(event)
        return got

    async def inspect(self) -> pb.RunnerState:
        """The generator's state, which its runner updates four times a second."""
        return await self.client.read_state(self.endpoints[0], self.name, 0, 60)

    async def holds_state(self) -> None:
        """Waits until the generator reports a request's state."""
        async with asyncio.timeout(WITHIN_S):
            while not (await self.inspect()).cache_bytes:
                await asyncio.sleep(0.05)

    def address(self, stage: int) -> tuple[str, str]:
        """The address of a stage and the name in its certificate."""
        ready = self.endpoints[stage].ready
        return f"{ready.host}:{ready.port}", runner_name(NODE)

    def live_requests(self, stage: int) -> int:
        """The number in the runner's last report to its node, four a second."""
        return self.processes[stage].state.live_requests


@dataclass(slots=True)
class WireAnswer:
    """The streamed parts of an answer, joined."""

    ids: list[int] = field(default_factory=list[int])
    text: str = ""
    prompt_ids: list[int] = field(default_factory=list[int])
    rounds: list[pb.Round] = field(default_factory=list[pb.Round])
    finished: pb.Finished | None = None

    def add(self, event: pb.GenerateEvent) -> None:
        match event.WhichOneof("event"):
            case "started":
                self.prompt_ids = list(event.started.prompt_ids)
            case "delta":
                self.ids += event.delta.round.tokens
                self.text += event.delta.text
                self.rounds.append(event.delta.round)
            case "finished":
                self.finished = event.finished
                self.text += event.finished.text
            case _:
                pass


@asynccontextmanager
async def running(
    bounds: Sequence[int] = (0, 16), folder: Path = DEMO, **changes: Any
) -> AsyncGenerator[Placement]:
    """Stages [bounds[i], bounds[i+1]) of a model, loaded at once, connected, stopped at the end."""
    exited: list[RunnerProcess] = []
    stages = len(bounds) - 1
    scratch = Path(tempfile.mkdtemp())
    kept_profiles.seed(scratch)
    common = {
        "num_stages": stages,
        "num_layers": bounds[-1],
        "profile_folder": f"{scratch}/profiles",
    }
    processes = [
        RunnerProcess(spec(folder, a, b, i, **(common | changes)), exited.append, on_answer, LAN)
        for i, (a, b) in enumerate(pairwise(bounds))
    ]
    channels = Channels(runner_credentials(NODE, KEY))
    try:
        starting = (p.start(runner_host(), lambda _: None) for p in processes)
        endpoints = [Endpoint(NODE, ready) for ready in await asyncio.gather(*starting)]
        placement = Placement(processes, endpoints, channels, exited)
        await placement.connect()
        yield placement
    finally:
        await channels.close()
        _ = await asyncio.gather(*(process.stop() for process in processes))
        kept_profiles.take(scratch)
        shutil.rmtree(scratch)


class Child:
    """A runner process without a supervisor: its socket, its stderr and its exit status."""

    def __init__(self, stage: pb.StageSpec, stderr: Path, **environment: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs, stderr.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "exo_node.shard.runner.main", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**runner_environment(os.environ), **environment},
            )
        self._socket = ours
        self._socket.settimeout(WITHIN_S)
        self._file = ours.makefile("rb")
        self._stderr = stderr
        credentials = runner_credentials(NODE, KEY)
        self._send(
            start=pb.RunnerStart(
                stage=stage,
                node=NODE,
                host="127.0.0.1",
                certificate=credentials.certificate_pem,
                private_key=credentials.key_pem,
                authority=credentials.authority_pem,
            )
        )

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def receive(self) -> pb.FromRunner | None:
        """The next message; None when the process closed its end."""
        head = self._file.read(4)
        if len(head) < 4:
            return None
        return pb.FromRunner.FromString(self._file.read(struct.unpack(">I", head)[0]))

    def until(self, kind: str) -> pb.FromRunner:
        """The first message of a kind; fails the test where there is none."""
        while (message := self.receive()) is not None:
            if message.WhichOneof("message") == kind:
                return message
        raise AssertionError(f"the runner ended without {kind}: {self.stderr}")

    def stop(self) -> None:
        self._send(stop=pb.RunnerStop())

    def hang_up(self) -> None:
        """Closes the socket, as the end of the runner's node does."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        if self.process.poll() is None:
            self.process.kill()
        _status = self.process.wait()

    def _send(
        self, *, start: pb.RunnerStart | None = None, stop: pb.RunnerStop | None = None
    ) -> None:
        data = pb.ToRunner(start=start, stop=stop).SerializeToString()
        self._socket.sendall(struct.pack(">I", len(data)) + data)
