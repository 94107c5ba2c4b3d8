"""Writes what documents take from the code: `python docs/generate.py` (tests say when it is due).

`docs/openapi.json`, the table of fields in `docs/api.md`, the schemas of `bench serve` and of
shared results, the table of `docs/results.md` (a row for each file in `docs/results/`), and the
dashboard's copy of `docs/clients.md`, which the package cannot take from `docs/`.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, cast, get_args

from exo_node.node.api.http.bodies import TolerantBody
from exo_node.node.api.http.routes import ApiRoute
from exo_node.node.api.openapi import Effect, bodies, document, effects
from exo_node.node.api.operations.operations_api import Operations
from exo_node.node.api.server import Services, api_routes
from exo_node.node.api.shared.answering import Answering
from exo_node.node.machine.events import EventLog
from exo_node.node.machine.timing import PROFILES
from exo_node_bench.serve.result import Result
from exo_node_bench.share.result import SharedResult, Spread, read_result

HERE: Final = Path(__file__).resolve().parent
BEGIN: Final = "<!-- made by docs/generate.py -->\n"
END: Final = "<!-- until here -->\n"
"""Around the table."""
CLIENTS: Final = HERE.parent / "dashboard" / "static" / "clients.md"
"""The dashboard's copy of the clients' recipes."""
ANSWERING: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
    "/api/embed",
)


def routes() -> list[ApiRoute]:
    """All routes of a node; the services behind them are never called."""
    service: Any = cast(Any, object())
    services = Services(
        service,
        cast(Any, Operations),
        EventLog(),
        joining=service,
        files=service,
        responses=service,
    )
    return api_routes(Answering(service, 1.0), services, PROFILES["lan"], service)


def openapi() -> str:
    return json.dumps(document(routes()), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def fields_table(routes: Sequence[ApiRoute], paths: Iterable[str]) -> str:
    """Markdown with a row for each path and a column for each effect."""
    body_of = bodies(routes)
    heads = ("Endpoint", "Honoured", "Without effect", "Refused", "Anything else")
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for path in paths:
        body = body_of["POST", path]
        by_effect = {
            effect: [f"`{name}`" for name, own in effects(body).items() if own == effect]
            for effect in get_args(Effect)
        }
        ignored = ", ".join(by_effect.pop("ignored"))
        cells = [", ".join(names) or "none" for names in by_effect.values()]
        rest = "ignored and named" if issubclass(body, TolerantBody) else "refused"
        rest = f"{ignored}: ignored and named; others {rest}" if ignored else rest
        rows.append(f"| `{path}` | {' | '.join(cells)} | {rest} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """The page with the table of fields anew."""
    return _between_marks(page, fields_table(routes(), ANSWERING))


def _between_marks(page: str, table: str) -> str:
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def with_results(page: str) -> str:
    """The page with a row for each shared result. Raises InvalidSettings for other files."""
    results = [
        read_result(file.read_bytes(), f"docs/results/{file.name}")
        for file in (HERE / "results").glob("*.json")
    ]
    results.sort(key=lambda each: (each.machine.chip, each.model.id or "", each.date))
    heads = ("Machine", "Model", "Versions", "Exact", "Plain", "Drafted", "Gain", "First token")
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    rows += [f"| {' | '.join(_cells(each))} |" for each in results]
    return _between_marks(page, "\n".join(rows) + "\n")


def _cells(result: SharedResult) -> tuple[str, ...]:
    machine, model, speed = result.machine, result.model, result.speed
    size = [f"{machine.memory_gb} GB"] if machine.memory_gb else []
    cores = [f"{machine.cores} cores"] if machine.cores and machine.backend == "cpu" else []
    numbers = f"{model.bits} bits" if model.bits else model.dtype
    random = ["random weights"] if model.weights == "random" else []
    source = f", [from a bench](../{result.source})" if result.source else ""
    versions = result.versions
    return (
        ", ".join((machine.chip, machine.backend, *size, *cores, machine.system)),
        ", ".join((model.id or f"not named, {model.layers} layers", numbers, *random)),
        f"exo-node {versions.exo_node}, mlx {versions.mlx}, {result.date}{source}",
        _exactness(result),
        _figure(speed.plain_tok_s, "tok/s"),
        _figure(speed.drafted_tok_s, "tok/s"),
        _figure(speed.ratio, "times"),
        f"{_figure(speed.first_token_s, 's')} after {speed.prompt_tokens}"
        if speed.first_token_s
        else "",
    )


def _exactness(result: SharedResult) -> str:
    """The verdict, else the checks that there are; the floor where drafts need one."""
    identity = result.identity
    parts = ", ".join(f"{name} {finding}" for name, finding in identity.parts.items())
    text = identity.verdict.replace("_", " ") if identity.verdict else parts
    floor = identity.floor or 1
    text = f"{text}, from {floor} rows" if floor > 1 else text
    grouped = identity.products_from
    return f"{text}, products from {grouped} rows" if grouped else text


def _figure(spread: Spread | None, unit: str) -> str:
    if spread is None:
        return ""
    wide = f" ({spread.least:g}-{spread.most:g})" if spread.least and spread.most else ""
    return f"{spread.median:g}{wide} {unit}"


if __name__ == "__main__":
    _ = (HERE / "openapi.json").write_text(openapi())
    schema = json.dumps(Result.model_json_schema(), indent=1)
    _ = (HERE / "bench-serve.schema.json").write_text(f"{schema}\n")
    schema = json.dumps(SharedResult.model_json_schema(), indent=1)
    _ = (HERE / "result.schema.json").write_text(f"{schema}\n")
    for name, written in (("api.md", with_table), ("results.md", with_results)):
        page = HERE / name
        _ = page.write_text(written(page.read_text()))
    _ = CLIENTS.write_text((HERE / "clients.md").read_text())
