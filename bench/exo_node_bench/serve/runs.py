"""The runs of a bench: closed loops of clients, and servers that take turns."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2
from pydantic import ValidationError

from ..spread import rotated
from .answer import Answer, AnswerFailure, Usage
from .figures import BenchRun
from .server import Server, UnusableServer, ask, fetch
from .workloads import Calibration, Conversation, Workload, probe_text

FEW_WORDS: Final = 16
MANY_WORDS: Final = 216
_WARM_TOKENS: Final = 4


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The runs of a bench: every cell once in each repeat, on each server."""

    servers: tuple[Server, ...]
    workloads: tuple[Workload, ...]
    concurrencies: tuple[int, ...]
    repeats: int
    requests: int
    """The most of each run; every client has at least one."""
    output_tokens: int
    seed: int
    silence_s: float
    """Seconds without data after which an answer fails."""
    limit_s: float | None = None
    """Seconds in which the runs begin their requests. Each run has the same share."""
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of every request."""

    @property
    def runs(self) -> int:
        """The number of runs in all repeats."""
        cells = len(self.workloads) * len(self.concurrencies)
        return cells * len(self.servers) * self.repeats

    @property
    def share_s(self) -> float:
        return float("inf") if self.limit_s is None else self.limit_s / self.runs

    def steps(self, repeat: int) -> Iterator[tuple[Workload, int, Server]]:
        """A repeat's runs. Another server begins each time, so that drift hits all alike."""
        at = repeat * len(self.workloads) * len(self.concurrencies)
        for workload in self.workloads:
            for concurrency in self.concurrencies:
                for server in rotated(self.servers, at):
                    yield workload, concurrency, server
                at += 1

    def conversations(
        self, calibration: Calibration, workload: Workload, concurrency: int, repeat: int
    ) -> list[Conversation]:
        """A run's conversations: the same for all servers, new to their caches in each repeat."""
        count = max(concurrency, workload.needed(self.requests))
        seed = f"{self.seed}/{workload.name}/{concurrency}/{repeat}"
        return workload.conversations(calibration, count, seed)


async def prepare(client: httpx2.AsyncClient, plan: BenchPlan) -> Calibration:
    """Warms every server up with each workload. Raises UnusableServer if one does not answer."""
    calibration = await calibrate(client, plan.servers[0])
    for server in plan.servers:
        for workload in plan.workloads:
            warm = workload.conversations(calibration, 1, f"{plan.seed}/{workload.name}/warm")
            for answer in await _converse(client, server, warm[0], _WARM_TOKENS):
                if answer.failure:
                    raise UnusableServer(
                        f"server {server.name}: the first request of workload {workload.name} "
                        f"failed: {answer.failure}; see the server's log, or leave the workload out"
                    )
    return calibration


async def measure(
    client: httpx2.AsyncClient, plan: BenchPlan, calibration: Calibration
) -> AsyncIterator[BenchRun]:
    """Yields each run when it ends. No repeat begins after the limit."""
    began = time.perf_counter()
    for repeat in range(plan.repeats):
        if plan.limit_s is not None and repeat and time.perf_counter() - began >= plan.limit_s:
            return
        for workload, concurrency, server in plan.steps(repeat):
            conversations = plan.conversations(calibration, workload, concurrency, repeat)
            wall, cpu = time.perf_counter(), time.process_time()
            until = wall + plan.share_s
            answers = await closed_loop(
                client,
                server,
                conversations,
                concurrency,
                plan.output_tokens,
                lambda until=until: time.perf_counter() < until,
            )
            yield BenchRun(
                server.name,
                workload.name,
                concurrency,
                repeat,
                max(answer.ended for answer in answers) - wall,
                time.process_time() - cpu,
                tuple(answers),
            )


async def closed_loop(
    client: httpx2.AsyncClient,
    server: Server,
    conversations: Sequence[Conversation],
    concurrency: int,
    output_tokens: int,
    has_time: Callable[[], bool],
) -> list[Answer]:
    """`concurrency` clients, each with one request in flight; answers in the questions' order.

    A client's first conversation always begins, the others while `has_time`.
    """
    waiting = iter(range(len(conversations)))
    replies: list[list[Answer]] = [[] for _ in conversations]

    async def work() -> None:
        for number in waiting:
            replies[number] = await _converse(client, server, conversations[number], output_tokens)
            if not has_time():
                return

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
        if answers and answers[-1].failure:
            at = answers[-1].ended
            failure = AnswerFailure("not sent, as the turn before it failed")
            answers.append(Answer(at, at, failure=failure, turn=turn))
            continue
        messages = conversation.messages([answer.text for answer in answers])
        answers.append(await ask(client, server, messages, output_tokens, turn))
    return answers


async def calibrate(client: httpx2.AsyncClient, server: Server) -> Calibration:
    """Tokens for words, from the server's counts of two short prompts. Raises UnusableServer."""
    counts: list[tuple[int, int]] = []
    for words in (FEW_WORDS, MANY_WORDS):
        # Not streamed: servers that leave usage out of a stream have it here.
        messages = [{"role": "user", "content": probe_text(words)}]
        body = {**server.body, "model": server.model, "messages": messages, "max_tokens": 1}
        reply = await fetch(client, server, "/v1/chat/completions", body)
        try:
            usage = Usage.model_validate(reply.get("usage"))
        except ValidationError:  # the server does not count
            return Calibration()
        counts.append((words, usage.prompt_tokens))
    return Calibration.between(*counts)
