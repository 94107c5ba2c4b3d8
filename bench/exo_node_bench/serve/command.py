"""`exo-node bench serve`: a server under load, or several, and a page of results to share."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

from exo_node.node.cli import output
from exo_node.node.cli.client import call, connect, headers_of
from exo_node.node.cli.flags import DataDir, LocalPort

if TYPE_CHECKING:
    from .result import Result
    from .server import Server
    from .session import Session
    from .workloads import Workload


_OWN: Final = "exo-node"
"""The name of the local node on the page."""
_SPREADS: Final = ("tokens/s", "TTFT")
"""The columns that have their spread on the terminal; on the page all do."""
_MODELS: Final = "/v1/models"
_LIST_S: Final = 30.0
_MOST_TEMPERATURE: Final = 2.0
_MOST_TOKENS: Final = 1 << 20

_Servers = Annotated[
    list[str] | None,
    typer.Option(
        "--server",
        metavar="NAME=URL",
        help="Any server with OpenAI's API; two or more are compared. The page shows NAME. "
        "Default: the node here.",
    ),
]
_Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model", metavar="ID", help="The model; NAME=ID of several servers. Default: the loaded."
    ),
]
_Keys = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="NAME=VARIABLE", help="The variable that holds a server's key."),
]
_Clients = Annotated[str, typer.Option(metavar="N,N,…", help="Clients at the same time.")]
_Workloads = Annotated[
    str, typer.Option(metavar="W,W,…", help="questions, agent, or a prompt's number of tokens.")
]
_Questions = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help='One a line, or .jsonl with "prompt"; default: the bundled 32.'
    ),
]
_OutputTokens = Annotated[
    int, typer.Option(min=1, max=_MOST_TOKENS, metavar="N", help="Longest answer.")
]
_Requests = Annotated[
    int,
    typer.Option(
        min=1,
        max=100_000,
        metavar="N",
        help="Most requests of a run; each client has one at least.",
    ),
]
_Repeats = Annotated[
    int, typer.Option(min=1, max=1000, metavar="N", help="Times that every run is made.")
]
_Limit = Annotated[
    float,
    typer.Option(
        min=0, max=1e6, metavar="SECONDS", help="Runs begin no request after it; 0: no limit."
    ),
]
_Temperature = Annotated[
    float, typer.Option(min=0, max=_MOST_TEMPERATURE, metavar="T", help="0 is greedy.")
]
_Extra = Annotated[
    str | None, typer.Option("--extra-body", metavar="JSON", help="Fields of every request.")
]
_Seed = Annotated[int, typer.Option(metavar="N", help="Another one makes other prompts.")]
_Silence = Annotated[
    float,
    typer.Option(
        min=1, max=86_400, metavar="SECONDS", help="An answer without a byte for so long failed."
    ),
]
_SystemTokens = Annotated[
    int, typer.Option(min=1, max=_MOST_TOKENS, metavar="N", help="Of an agent's prompt.")
]
_Turns = Annotated[
    int, typer.Option(min=2, max=100, metavar="N", help="Of an agent's conversation.")
]
_ToolTokens = Annotated[
    int, typer.Option(min=1, max=_MOST_TOKENS, metavar="N", help="Of a tool's result.")
]
_ToolRole = Annotated[str, typer.Option(metavar="tool|user", help="The role of a tool's result.")]
_Output = Annotated[
    str | None,
    typer.Option(
        "--output", metavar="DIR", help="Where the page, JSON and CSV go; default: in serve-bench."
    ),
]


def serve(
    server: _Servers = None,
    model: _Models = None,
    key: _Keys = None,
    concurrency: _Clients = "1,4",
    workloads: _Workloads = "questions,512",
    questions: _Questions = None,
    output_tokens: _OutputTokens = 64,
    requests: _Requests = 16,
    repeats: _Repeats = 3,
    limit: _Limit = 90.0,
    temperature: _Temperature = 0.0,
    extra_body: _Extra = None,
    seed: _Seed = 1,
    silence: _Silence = 300.0,
    system_tokens: _SystemTokens = 2048,
    turns: _Turns = 4,
    tool_tokens: _ToolTokens = 256,
    tool_role: _ToolRole = "tool",
    output_dir: _Output = None,
    port: LocalPort = None,
    data_dir: DataDir = None,
) -> None:
    """Measure the node here, or other servers, under load.

    Prints tables; writes a page to share, JSON and CSV, without names, addresses and prompts.
    Exit status 1 where a request failed.
    """
    from ..folder import output_folder
    from .arguments import parse_numbers, parse_object, parse_role, parse_workloads
    from .runs import BenchPlan
    from .session import Session
    from .workloads import AGENT, Workload

    role = parse_role(tool_role)
    agent = Workload(AGENT, system_tokens, turns=turns, tool_tokens=tool_tokens, tool_role=role)
    extra = parse_object(extra_body) if extra_body is not None else {}
    chosen = _workloads(parse_workloads(workloads), questions, agent)
    clients = parse_numbers("--concurrency", concurrency)
    servers = _servers(server, model, key, port, data_dir)
    body = {"temperature": temperature, **extra}
    plan = BenchPlan(
        servers=tuple(replace(each, body=body) for each in servers),
        workloads=chosen,
        concurrencies=clients,
        repeats=repeats,
        requests=requests,
        output_tokens=output_tokens,
        seed=seed,
        silence_s=silence,
        limit_s=limit or None,
        temperature=temperature,
        extra=extra,
    )
    folder = output_folder(output_dir, "serve-bench", servers[0].model)
    session = Session(plan, folder, output.note)
    try:
        session.measure()
    finally:  # what was measured is shown, also after a failure
        if session.record is not None and session.record.runs:
            _finish(session, session.record.result())
    raise typer.Exit(130 if session.is_interrupted else 1 if session.failures() else 0)


def _workloads(
    names: Sequence[str], questions: str | None, agent: "Workload"
) -> "tuple[Workload, ...]":
    from .arguments import fault, read_questions
    from .workloads import AGENT, QUESTIONS, Workload

    if questions is not None and QUESTIONS not in names:
        raise fault("--questions", f"{QUESTIONS} is not in --workloads; add it there")
    workloads: list[Workload] = []
    for name in names:
        if name == QUESTIONS:
            workloads.append(Workload(QUESTIONS, questions=read_questions(questions)))
        elif name == AGENT:
            workloads.append(agent)
        else:
            workloads.append(Workload(f"{name} tokens", int(name)))
    return tuple(workloads)


def _servers(
    urls: list[str] | None,
    models: list[str] | None,
    keys: list[str] | None,
    port: str | None,
    data_dir: str | None,
) -> "list[Server]":
    """The servers under test, each with its model. Raises UnusableServer, CommandFailed."""
    from .arguments import fault, parse_pairs, parse_servers
    from .server import Server, choose_model

    if not urls:
        if keys:
            raise fault("--key", "it is for --server; the node's own key is EXO_API_KEY")
        endpoint = connect(port, data_dir)
        ids = parse_pairs("--model", models or [], [_OWN])
        listing = call(endpoint, _MODELS)  # also to find out whether a node answers
        model = ids.get(_OWN) or choose_model(f"the node at {endpoint}", listing)
        return [Server(_OWN, f"http://{endpoint}", model, headers=headers_of(endpoint))]
    if port is not None or data_dir is not None:
        flag = "--port" if port is not None else "--data-dir"
        raise fault(flag, "it names the node here; leave it out beside --server")
    named = parse_servers(urls)
    ids = parse_pairs("--model", models or [], list(named))
    variables = parse_pairs("--key", keys or [], list(named))
    servers = [Server(name, url, headers=_key(variables.get(name))) for name, url in named.items()]
    return [
        replace(each, model=ids.get(each.name) or asyncio.run(_only_model(each)))
        for each in servers
    ]


async def _only_model(server: "Server") -> str:
    from .server import choose_model, connections, fetch

    async with connections(_LIST_S) as client:
        return choose_model(server.name, await fetch(client, server, _MODELS))


def _key(variable: str | None) -> dict[str, str]:
    """The header with a server's key."""
    from exo_node.node.machine.setting_sources import environment

    from .arguments import fault

    if variable is None:
        return {}
    if not (key := environment().get(variable)):
        raise fault("--key", f"there is no variable {variable!r} in the environment; set it")
    if not (key.isascii() and key.isprintable()):
        raise fault("--key", f"the variable {variable!r} holds no key: it must be printable ASCII")
    return {"Authorization": f"Bearer {key}"}


def _finish(session: "Session", result: "Result") -> None:
    """Prints the tables, then writes the files."""
    from ..tables import table_text
    from .workload_tables import lengths_text, ratio_tables, turns_text, workload_tables

    width = output.terminal_width()
    for table in workload_tables(result):
        print(f"{table_text(table, _SPREADS, width)}\n")
    for table in ratio_tables(result):
        ratios = replace(table, title=f"{table.title}, ratios within a repeat (least-most)")
        print(f"{table_text(ratios, table.header, width)}\n")
    print("medians over the repeats (least-most); times in milliseconds")
    for line in (*lengths_text(result), *turns_text(result), *session.failures()):
        print(output.joined([line]))
    session.write(result)
    output.note(
        f"written to {session.folder}: index.html is the page; look at it before you share it"
    )
