"""The page of a result: one HTML file without scripts and requests, to be shared."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from .charts import Chart
from .result import DraftingUse, Result, ServerFacts, StageNode, WorkloadFacts
from .tables import (
    Cell,
    Table,
    clients_text,
    lengths_text,
    ratio_tables,
    turns_text,
    workload_tables,
)

_TEMPLATE: Final = Path(__file__).parents[1] / "page.html"
_ENDS: Final = {
    "running": "The bench is still running or was killed",
    "limit": "The time limit ended the bench before its last repeat",
    "interrupted": "The bench was interrupted",
}


def render(result: Result, charts: Sequence[Chart] = ()) -> str:
    """The page as HTML. All texts are escaped but the charts, which are elements."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    failed = sum(int(run.figures["failed"] or 0) for run in result.runs)
    return environment.from_string(_TEMPLATE.read_text("utf-8")).render(
        result=result,
        title=title(result),
        end=_ENDS.get(result.state),
        failed=failed,
        kinds=_failure_kinds(result),
        headlines=list(_headlines(result)),
        facts=[(facts.name, list(_server_facts(facts))) for facts in result.servers],
        measured=list(_measured(result)),
        tables=[
            (table, [chart for chart in charts if chart.workload == table.title])
            for table in workload_tables(result)
        ],
        ratios=list(ratio_tables(result)),
        workloads=[(each.name, _workload_text(each)) for each in result.settings.workloads],
        notes=[*lengths_text(result), *turns_text(result)],
    )


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
    yield "DraftCounts", "; ".join(map(_drafting_text, facts.drafting)) or "not reported"
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
    yield "ClientMachine", f"{client.chip}, {client.memory_gb} GB, {client.cores} cores"
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
