"""Requests made of the OpenAPI document by schemathesis, sent to a server, and what is wrong with
the answers."""

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
STAYS = frozenset({"/v1/events"})
"""Streams without an end."""


@dataclass
class Findings:
    """Violations of the document, a line each, and the numbers of requests and statuses."""

    faults: list[str] = field(default_factory=list[str])
    requests: int = 0
    statuses: dict[int, int] = field(default_factory=dict[int, int])


def fuzz(
    document: Mapping[str, Any],
    base_url: str,
    headers: Mapping[str, str],
    *,
    examples: int,
    paths: Sequence[str] = (),
    start: int = 0,
) -> Findings:
    """Sends `examples` valid and as many invalid requests to every operation, or those of `paths`.

    `start` is the seed.
    """
    schemathesis: Any = importlib.import_module("schemathesis")
    schema: Any = schemathesis.openapi.from_dict(_with_the_demo(document))
    findings = Findings()
    for result in schema.get_all_operations():
        operation: Any = result.ok()
        if operation.path in STAYS or (paths and operation.path not in paths):
            continue
        for mode in schemathesis.GenerationMode:
            _try(operation, mode, base_url, headers, examples, start, findings)
    return findings


def _with_the_demo(document: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the document whose requests name the demo: others end early."""
    copy: dict[str, Any] = json.loads(json.dumps(document))
    for schema in copy["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": "demo"}
    return copy


def _try(
    operation: Any,
    mode: Any,
    base_url: str,
    headers: Mapping[str, str],
    examples: int,
    start: int,
    findings: Findings,
) -> None:
    all_checks: Any = importlib.import_module("schemathesis.checks").CHECKS
    checks: Any = all_checks.get_by_names(list(CHECKED))

    @seed(start)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=(HealthCheck.filter_too_much, HealthCheck.too_slow),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        response = case.call(base_url=base_url, headers=dict(headers), timeout=60)
        findings.requests += 1
        statuses = findings.statuses
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        try:
            case.validate_response(response, checks=checks)
        except (Exception, BaseExceptionGroup) as fault:  # every failure is a finding
            text = " ".join(str(fault).split())[:400]
            findings.faults.append(f"{operation.label}: {response.status_code}: {text}")

    try:
        send()
    except Unsatisfiable:
        pass  # no request of this kind exists
    except Exception as fault:
        findings.faults.append(f"{operation.label}: {type(fault).__name__}: {fault}"[:400])
