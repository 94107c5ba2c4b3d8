"""mlx-lm's ring pipeline as a peer in a bench: `mlx.launch` starts its ranks, which wait here."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAUNCH = Path(sys.executable).parent / "mlx.launch"
SCRIPT = Path(__file__).parent / "pipeline_ring.py"
RANK_WITHIN_S = 60.0

Lines = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class RingAnswer:
    """The answer of rank 0, with the seconds to the first id, and from there to the last."""

    ids: tuple[int, ...]
    first_s: float
    rest_s: float


@dataclass(frozen=True, slots=True)
class MlxRing:
    """The ranks of one ring, rank 0 first."""

    ranks: tuple[Lines, ...]
    pids: tuple[int, ...]

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path, dtype: str, size: int) -> "AsyncGenerator[MlxRing]":
        """Starts the ranks, and stops their launcher while they live.

        Its relay of their output polls without a pause and would take a core from them.
        """
        arrived: asyncio.Queue[Lines] = asyncio.Queue()

        async def arrive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await arrived.put((reader, writer))

        server = await asyncio.start_server(arrive, "127.0.0.1", 0)
        launcher = _launch(folder, dtype, size, server.sockets[0].getsockname()[1])
        ranks: list[tuple[int, int, Lines]] = []
        try:
            for _ in range(size):
                lines = await asyncio.wait_for(arrived.get(), RANK_WITHIN_S)
                hello = json.loads(await lines[0].readline())
                assert hello["size"] == size
                ranks.append((hello["rank"], hello["pid"], lines))
            ranks.sort(key=lambda rank: rank[0])
            if size > 1:
                launcher.send_signal(signal.SIGSTOP)
            yield cls(tuple(lines for _, _, lines in ranks), tuple(pid for _, pid, _ in ranks))
        finally:
            for _, _, (_, writer) in ranks:
                writer.close()
            launcher.send_signal(signal.SIGCONT)
            if len(ranks) < size:
                launcher.terminate()
            _ = await asyncio.to_thread(launcher.wait)
            server.close()

    async def answer(self, prompt: Sequence[int], tokens: int, chunk: int) -> RingAnswer:
        question = json.dumps({"prompt": list(prompt), "tokens": tokens, "chunk": chunk}) + "\n"
        for _, writer in self.ranks:
            writer.write(question.encode())
        reply: dict[str, Any] = json.loads(await self.ranks[0][0].readline())
        return RingAnswer(tuple(reply["ids"]), reply["first_s"], reply["rest_s"])


def _launch(folder: Path, dtype: str, size: int, port: int) -> "subprocess.Popen[bytes]":
    """Starts the ranks; a ring of one is plain mlx-lm, for which `mlx.launch` has no ring."""
    script = [str(SCRIPT), str(folder), dtype, str(port)]
    ring = ["-n", str(size), "--backend", "ring", "--starting-port", str(_free_ports(size))]
    launcher = [str(LAUNCH), *ring, "--python", sys.executable, *script]
    return subprocess.Popen(
        launcher if size > 1 else [sys.executable, *script],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


def _free_ports(count: int) -> int:
    """The first of `count` consecutive free ports."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            start = first.getsockname()[1]
        used_ports = 0
        for port in range(start, start + count):
            with socket.socket() as probe:
                used_ports += probe.connect_ex(("127.0.0.1", port)) == 0
        if not used_ports and start + count < 65536:
            return start
