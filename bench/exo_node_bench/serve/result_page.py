"""The page of a result: its facts, tables and charts."""

from collections.abc import Iterator, Sequence
from typing import Final

from ..charts import Chart, Line, line_chart
from ..page import Page, Section
from ..spread import Spread
from ..tables import Cell, Table
from .result import DraftingUse, Result, RunResult, ServerFacts, StageNode, WorkloadFacts
from .workload_tables import (
    clients_text,
    lengths_text,
    ratio_tables,
    spread_of,
    turns_text,
    workload_tables,
)

_ENDS: Final = {
    "running": "The bench is still running or was killed",
    "limit": "The time limit ended the bench before its last repeat",
    "interrupted": "The bench was interrupted",
}
_PANELS: Final = (
    ("output_throughput", "tokens/s, all clients"),
    ("median_ttft_ms", "median TTFT, ms"),
    ("p99_itl_ms", "p99 ITL, ms"),
)
_INTRO: Final = (
    "A closed loop: each client has one request in flight and sends the next when the answer has "
    "ended. Figures are medians over the repeats; below them are the least and the most. Times are "
    "in milliseconds."
)
_RATIO: Final = (
    "The first server's figure over the other's, taken within each repeat; the median of these "
    "ratios, and the least and the most of them. Above 1 is better for tokens/s, below 1 for times."
)
_LEGEND: Final = (
    (
        "tokens/s",
        "tokens of all whole answers over the time of the run; per client: divided by the clients",
    ),
    ("TTFT", "from the request to the first event with text: the median, and the 95th percentile"),
    (
        "ITL",
        "between two events with text: the median, and the 99th percentile. An event may have "
        "several tokens, above all with drafts",
    ),
    (
        "TPOT",
        "from the first event with text to the last, over the tokens after the first: the mean",
    ),
    ("accepted", "of the tokens that were drafted, those that the model itself would have written"),
)
_FOOTER: Final = (
    "The names of the figures in serve.json, beside this page, are those of vllm bench serve. "
    "Neither file names a machine, a person, an address or a prompt."
)


def page_of(result: Result) -> Page:
    """The texts, tables and charts of a result."""
    names = [server.name for server in result.servers]
    return Page(
        title=title(result),
        command="exo-node bench serve",
        origin=f"Measured over HTTP by exo-node bench serve, {result.date[:10]}",
        warnings=list(_warnings(result)),
        failures=[f"{count}: {kind}" for kind, count in _failure_kinds(result)],
        headlines=list(_headlines(result)),
        facts=[
            *(
                (facts.name if len(names) > 1 else "Model and placement", [*_server_facts(facts)])
                for facts in result.servers
            ),
            ("Measurement", list(_measured(result))),
        ],
        sections=[
            *(
                Section(f"Workload: {table.title}", table, list(_charts(result, table.title)))
                for table in workload_tables(result)
            ),
            *(Section(table.title, table, intro=_RATIO) for table in ratio_tables(result)),
        ],
        remarks=[
            f"{names[0]} and {same.other} gave the same text in {same.same} of {same.both} answers "
            "that both gave."
            for same in result.same_answers
        ],
        intro=_INTRO,
        legend=[*((w.name, _workload_text(w)) for w in result.settings.workloads), *_LEGEND],
        notes=[*lengths_text(result), *turns_text(result)],
        footer=_FOOTER,
    )


def _warnings(result: Result) -> Iterator[str]:
    if end := _ENDS.get(result.state):
        yield f"{end}: {len(result.runs)} of {result.runs_planned} runs are here."
    if failed := sum(int(run.figures["failed"] or 0) for run in result.runs):
        requests = "1 request" if failed == 1 else f"{failed} requests"
        yield f"{requests} failed. Failed requests are in no figure below but their count."


def _charts(result: Result, workload: str) -> Iterator[Chart]:
    """A line for each server over the number of clients."""
    runs = [run for run in result.runs if run.workload == workload]
    number = list(dict.fromkeys(run.workload for run in result.runs)).index(workload)
    for figure, label in _PANELS:
        lines = [
            Line(server.name, [*_points([r for r in runs if r.server == server.name], figure)])
            for server in result.servers
        ]
        yield line_chart(f"c{number}-{figure}", label, "clients", lines, doubling=True)


def _points(runs: Sequence[RunResult], figure: str) -> Iterator[tuple[int, Spread]]:
    for clients in sorted({run.max_concurrency for run in runs}):
        if spread := spread_of([r for r in runs if r.max_concurrency == clients], figure):
            yield clients, spread


def title(result: Result) -> str:
    """The model and the chips that it ran on; of a comparison the servers."""
    server, *others = result.servers
    if others:
        return " and ".join(each.name for each in result.servers)
    chips = dict.fromkeys(node.chip for node in server.nodes)
    return f"{server.model.id} on {' and '.join(chips)}" if chips else server.model.id


def _headlines(result: Result) -> Iterator[tuple[str, str]]:
    """The figures of the first server that most people look for, each with its meaning."""
    name = result.servers[0].name
    table = next(iter(workload_tables(result)), None)
    if table is None:
        return
    at = {heading: number for number, heading in enumerate(table.header)}
    rows = [row for row in table.rows if "server" not in at or row[at["server"]].text == name]
    of_server = f"{name}, " if "server" in at else ""
    for row in dict.fromkeys((rows[0], rows[-1])):
        yield f"{row[at['tokens/s']].text} tokens/s", f"{of_server}{_clients(table, row)}"
    first = f"to the first token, {of_server}{_clients(table, rows[0])}"
    yield f"{rows[0][at['TTFT']].text} ms", first


def _clients(table: Table, row: Sequence[Cell]) -> str:
    return f"{clients_text(int(row[0].text))}, {table.title}"


def _server_facts(facts: ServerFacts) -> Iterator[tuple[str, str]]:
    model = facts.model
    yield "Model", model.id
    if model.quantization_bits or model.format:
        bits = f"{model.quantization_bits} bits" if model.quantization_bits else "none"
        yield "Quantisation", bits if model.format is None else f"{bits}, files in {model.format}"
    if model.dtype:
        yield "Computes in", model.dtype
    if model.parameters:
        large = model.parameters >= 1e9
        count = model.parameters / (1e9 if large else 1e6)
        yield "Parameters", f"{count:.3g} {'billion' if large else 'million'}"
    if model.context_length:
        yield "Context", f"{model.context_length:,} tokens"
    yield "Drafts", "; ".join(map(_drafting_text, facts.drafting)) or "not reported"
    yield "Server", facts.software or "another OpenAI server"
    if facts.nodes:
        yield "Placement", _placement_text(facts)


def _drafting_text(way: DraftingUse) -> str:
    if way.drafter_kind == "none":
        return f"none ({way.answers} answers)"
    parts = [way.drafter_kind, way.draft_policy]
    if way.num_draft_tokens is not None:
        upto = "up to " if way.draft_policy == "adaptive" else ""
        parts.append(f"K {upto}{way.num_draft_tokens}")
    return f"{', '.join(filter(None, parts))} ({way.answers} answers)"


def _placement_text(facts: ServerFacts) -> str:
    count = len(facts.nodes)
    nodes = ", ".join(map(_node_text, facts.nodes))
    copies = f"; {facts.replicas} copies" if (facts.replicas or 1) > 1 else ""
    return f"{count} node{'s'[: count != 1]}: {nodes}{copies}"


def _node_text(node: StageNode) -> str:
    parts = [
        node.backend,
        f"{node.models_gb:.0f} GB for models" if node.models_gb else None,
        f"{node.layers} layers" if node.layers else None,
    ]
    return f"{node.chip} ({', '.join(filter(None, parts))})"


def _measured(result: Result) -> Iterator[tuple[str, str]]:
    client = result.client
    yield "Machine", f"{client.chip}, {client.memory_gb} GB, {client.cores} cores"
    yield "System", client.system
    yield "Versions", ", ".join(f"{name} {text}" for name, text in client.versions.items())
    if not all(server.same_machine for server in result.servers):
        yield "Network", "a server was on another machine; its way there is in the times"
    settings = result.settings
    yield (
        "Answers",
        f"at most {settings.output_tokens} tokens, temperature {settings.temperature:g}",
    )
    if settings.extra_fields:
        yield (
            "Extra fields",
            ", ".join(_extra_text(*each) for each in settings.extra_fields.items()),
        )
    yield "Repeats", f"{_repeats(result)}, seed {settings.seed}"
    yield "Date", result.date


def _workload_text(workload: WorkloadFacts) -> str:
    """The prompts of a workload, for a person."""
    if workload.questions:
        count = "1 question" if workload.questions == 1 else f"{workload.questions} questions, each"
        return f"{count} behind a number so that no cache has it"
    if workload.turns == 1:
        return f"prompts of {workload.prompt_tokens} tokens, of common words in no order"
    return (
        f"conversations of {workload.turns} turns: a system prompt of {workload.prompt_tokens} "
        "tokens, which all of a run share, a task, then a tool's result of "
        f"{workload.tool_tokens} tokens before each further answer"
    )


def _extra_text(name: str, value: int | float | bool | None) -> str:
    return name if value is None else f"{name} = {str(value).lower()}"


def _repeats(result: Result) -> str:
    measured = len({run.repeat for run in result.runs})
    if len(result.runs) == result.runs_planned:
        return str(measured)
    return f"{measured}, with {len(result.runs)} of {result.runs_planned} runs"


def _failure_kinds(result: Result) -> list[tuple[str, int]]:
    kinds: dict[str, int] = {}
    for run in result.runs:
        for kind, count in run.failures.items():
            kinds[kind] = kinds.get(kind, 0) + count
    return sorted(kinds.items(), key=lambda each: -each[1])
