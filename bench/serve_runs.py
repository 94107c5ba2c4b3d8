"""Runs of `bench/serve.py`: closed loops of clients, and servers that take turns."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx2
from serve_client import Answer, Server, ask, usage_of
from serve_metrics import Run
from serve_workloads import Calibration, Conversation, Workload, probe_text

FEW_WORDS: Final = 16
MANY_WORDS: Final = 216
_CONNECT_S: Final = 10.0


class Unusable(Exception):
    """A server that no bench can use; the message is the reason."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The runs of a bench: every cell once in each repeat, on each server."""

    servers: tuple[Server, ...]
    workloads: tuple[Workload, ...]
    concurrencies: tuple[int, ...]
    repeats: int
    requests: int
    """The minimum of each run; every client has at least one."""
    output_tokens: int
    seed: int
    silence_s: float
    """Seconds without data after which an answer fails."""

    def steps(self) -> Iterator[tuple[int, Workload, int, Server]]:
        """The runs in order. Another server begins each time, so that drift hits all alike."""
        at = 0
        for repeat in range(self.repeats):
            for workload in self.workloads:
                for concurrency in self.concurrencies:
                    for server in self.servers[at:] + self.servers[:at]:
                        yield repeat, workload, concurrency, server
                    at = (at + 1) % len(self.servers)

    def conversations(
        self, calibration: Calibration, workload: Workload, concurrency: int, repeat: int
    ) -> list[Conversation]:
        """A run's conversations: the same for all servers, new to their caches in each repeat."""
        count = max(concurrency, workload.needed(self.requests))
        seed = f"{self.seed}/{workload.name}/{concurrency}/{repeat}"
        return workload.conversations(calibration, count, seed)


@asynccontextmanager
async def client_of(plan: BenchPlan) -> AsyncGenerator[httpx2.AsyncClient]:
    timeout = httpx2.Timeout(plan.silence_s, connect=_CONNECT_S)
    connections = max(plan.concurrencies)
    limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
    # Without the environment's proxies, which would be measured too.
    async with httpx2.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
        yield client


async def measure(plan: BenchPlan) -> AsyncIterator[Run]:
    """Runs the plan after warm-ups; yields each run when it ends. Raises Unusable."""
    async with client_of(plan) as client:
        calibration = await calibrate(client, plan.servers[0])
        for server in plan.servers:
            for workload in plan.workloads:
                warm = workload.conversations(calibration, 1, f"{plan.seed}/{workload.name}/warm")
                _ = await _converse(client, server, warm[0], 4)
        for repeat, workload, concurrency, server in plan.steps():
            conversations = plan.conversations(calibration, workload, concurrency, repeat)
            wall, cpu = time.perf_counter(), time.process_time()
            answers = await closed_loop(
                client, server, conversations, concurrency, plan.output_tokens
            )
            ended = max(answer.ended for answer in answers)
            yield Run(
                server.name,
                workload.name,
                concurrency,
                repeat,
                ended - wall,
                time.process_time() - cpu,
                tuple(answers),
            )


async def closed_loop(
    client: httpx2.AsyncClient,
    server: Server,
    conversations: Sequence[Conversation],
    concurrency: int,
    output_tokens: int,
) -> list[Answer]:
    """`concurrency` clients, each with one request in flight; answers in the questions' order."""
    waiting = iter(range(len(conversations)))
    replies: list[list[Answer]] = [[] for _ in conversations]

    async def work() -> None:
        for number in waiting:
            replies[number] = await _converse(client, server, conversations[number], output_tokens)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(conversations))):
            _ = group.create_task(work())
    return [answer for answers in replies for answer in answers]


async def _converse(
    client: httpx2.AsyncClient, server: Server, conversation: Conversation, output_tokens: int
) -> list[Answer]:
    """One answer for each turn. Turns after a failed one count as failed too."""
    answers: list[Answer] = []
    for turn in range(len(conversation.turns)):
        if answers and answers[-1].error:
            at = answers[-1].ended
            lost = "not asked, as the turn before it failed"
            answers.append(Answer(at, at, (), "", None, "", lost, turn=turn))
            continue
        messages = conversation.messages([answer.text for answer in answers])
        answers.append(await ask(client, server, messages, output_tokens, turn))
    return answers


async def calibrate(client: httpx2.AsyncClient, server: Server) -> Calibration:
    """Tokens for words, from the server's counts of two short prompts. Raises Unusable."""
    counts: list[tuple[int, int]] = []
    for words in (FEW_WORDS, MANY_WORDS):
        # Not streamed: servers that leave usage out of a stream have it here.
        messages = [{"role": "user", "content": probe_text(words)}]
        body = {**server.body, "model": server.model, "messages": messages, "max_tokens": 1}
        value = await _json(client, "POST", server, "/v1/chat/completions", body)
        if usage := usage_of(value.get("usage")):
            counts.append((words, usage.prompt_tokens))
    return Calibration.between(*counts) if len(counts) == 2 else Calibration()


async def only_model(server: Server, silence_s: float) -> str:
    """The model that the server lists, if it is a single one. Raises Unusable."""
    async with httpx2.AsyncClient(timeout=silence_s, trust_env=False) as client:
        value = await _json(client, "GET", server, "/v1/models", None)
    match value:
        case {"data": [{"id": str(model)}]}:
            return model
        case {"data": [*models]}:
            several = f"{server.name} lists {len(models)} models"
            raise Unusable(f"{several}; say which is asked: --model {server.name}=ID")
        case _:
            raise Unusable(f"{server.name}: {server.url}/v1/models gives no list of models")


async def _json(
    client: httpx2.AsyncClient, method: str, server: Server, path: str, body: Any
) -> dict[str, Any]:
    url = f"{server.url}{path}"
    try:
        reply = await client.request(method, url, json=body, headers=server.headers)
        if reply.status_code != 200:
            text = reply.text[:300]
            raise Unusable(f"{server.name}: {method} {url} gives HTTP {reply.status_code}: {text}")
        return reply.json()
    except httpx2.HTTPError as fault:
        raise Unusable(f"{server.name}: {method} {url}: {type(fault).__name__} {fault}") from fault
    except ValueError as fault:
        raise Unusable(f"{server.name}: {method} {url} gives no JSON: {fault}") from fault
