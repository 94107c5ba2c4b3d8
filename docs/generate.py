"""Writes what documents take from the code: `python docs/generate.py` (tests say when it is due).

`docs/openapi.json`, the table of fields in `docs/api.md`, `docs/bench-serve.schema.json`, and the
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
    """The page with the table anew."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{fields_table(routes(), ANSWERING)}\n{END}{after}"


if __name__ == "__main__":
    _ = (HERE / "openapi.json").write_text(openapi())
    schema = json.dumps(Result.model_json_schema(), indent=1)
    _ = (HERE / "bench-serve.schema.json").write_text(f"{schema}\n")
    page = HERE / "api.md"
    _ = page.write_text(with_table(page.read_text()))
    _ = CLIENTS.write_text((HERE / "clients.md").read_text())
