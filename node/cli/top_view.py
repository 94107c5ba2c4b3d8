"""One reading of a node, and what `exo-node top` shows of it: no I/O, time comes as an argument."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..machine.log import escape_controls
from .output import placement_row, share, size, table, text_of

Json = Mapping[str, Any]

_LINE: Final = re.compile(
    r'([a-zA-Z_:][\w:]*)\{.*?\bmodel_name="((?:[^"\\]|\\.)*)".*\} (\d+(?:\.\d+)?(?:e[-+]?\d+)?)'
)
_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_TOKENS: Final = "vllm:generation_tokens_total"
_ESCAPED: Final = re.compile(r"\\(.)")
_KEPT: Final = ("weight_bytes", "cache_bytes", "prefix_cache_bytes")


@dataclass(frozen=True, slots=True)
class Reading:
    """A node's answers at `at` seconds of a monotonic clock; `metrics` is Prometheus text."""

    at: float
    cluster: Json
    placements: Sequence[Json]
    answered: Mapping[str, Json]
    metrics: str


def snapshot(reading: Reading, before: Reading | None) -> dict[str, Any]:
    """Everything that is shown, JSON-ready; rates are since `before` and None without it."""
    nodes: list[Json] = reading.cluster.get("nodes", [])
    return {
        "cluster": reading.cluster,
        "loads": {str(node.get("id")): _load(node) for node in nodes},
        "placements": reading.placements,
        "requests": _requests(reading, before),
        "answered": reading.answered,
    }


def shown(told: Json, clock: str, trouble: str = "") -> str:
    """The text of a snapshot. `trouble` says why there is none newer."""
    cluster: Json = told["cluster"]
    nodes: list[Json] = cluster.get("nodes", [])
    names = {node.get("id"): text_of(node.get("name", node.get("id"))) for node in nodes}
    head = cluster.get("head")
    lines = [
        f"{names.get(cluster.get('self'), '-')}, exo-node {text_of(cluster.get('version'))}, "
        f"{len(nodes)} node{'s'[: len(nodes) != 1]}, "
        f"head {names.get(head, text_of(head))}  {clock}"
    ]
    lines += [f"TROUBLE  {text_of(each)}" for each in (trouble, cluster.get("trouble")) if each]
    rows = [_node_row(node, told["loads"][str(node.get("id"))]) for node in nodes]
    lines += ["", *table(("NODE", "STATUS", "MODELS HOLD", "OF MEMORY", "LIVE REQUESTS"), rows), ""]
    if told["placements"]:
        rows = [placement_row(placement, names) for placement in told["placements"]]
        lines += table(("MODEL", "STATUS", "STAGES", "MTP"), rows)
    else:
        lines.append("no model is loaded; `exo-node chat` loads one")
    if models := sorted({*told["requests"], *told["answered"]}):
        heads = ("ASKED HERE", "RUNNING", "WAITING", "TOKENS/S", "ANSWERS", "TOKENS", "ACCEPTED")
        lines += ["", *table(heads, [_model_row(model, told) for model in models])]
    return "\n".join(escape_controls(line) for line in lines)


def parse_metrics(text: str) -> dict[str, dict[str, float]]:
    """Value by model by metric, of the lines that name a model; sums where there are several."""
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if (match := _LINE.fullmatch(line)) is None:
            continue
        name, model = match[1], _ESCAPED.sub(_unescaped, match[2])
        by_model = found.setdefault(name, {})
        by_model[model] = by_model.get(model, 0.0) + float(match[3])
    return found


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def _load(node: Json) -> dict[str, int]:
    """Bytes that stages hold on a node, and the requests that they work on."""
    stages: list[Json] = node.get("stages", [])
    return {
        "held_bytes": sum(stage.get(part) or 0 for stage in stages for part in _KEPT),
        "live_requests": sum(stage.get("live_requests") or 0 for stage in stages),
    }


def _requests(reading: Reading, before: Reading | None) -> dict[str, dict[str, Any]]:
    """By model: requests that came to this node, and the tokens that it emits a second."""
    now = parse_metrics(reading.metrics)
    old = {} if before is None else parse_metrics(before.metrics).get(_TOKENS, {})
    tokens = now.get(_TOKENS, {})
    models = {*now.get(_RUNNING, {}), *now.get(_WAITING, {}), *tokens}
    return {
        model: {
            "running": round(now.get(_RUNNING, {}).get(model, 0)),
            "waiting": round(now.get(_WAITING, {}).get(model, 0)),
            "tokens_per_second": None
            if before is None
            else _rate(tokens.get(model, 0.0), old.get(model, 0.0), reading.at - before.at),
        }
        for model in sorted(models)
    }


def _rate(now: float, before: float, seconds: float) -> float | None:
    """None where a counter went back: it is another process's."""
    return (now - before) / seconds if now >= before and seconds > 0 else None


def _node_row(node: Json, load: Mapping[str, int]) -> tuple[str, ...]:
    marks = [mark for mark in ("self", "head") if node.get(mark)]
    return (
        text_of(node.get("name")) + (f" ({', '.join(marks)})" if marks else ""),
        text_of(node.get("status")),
        size(load["held_bytes"]),
        size(node.get("memory_bytes")),
        str(load["live_requests"]),
    )


def _model_row(model: str, told: Json) -> tuple[str, ...]:
    asked: Json = told["requests"].get(model, {})
    totals: Json = told["answered"].get(model, {})
    rate = asked.get("tokens_per_second")
    return (
        model,
        text_of(asked.get("running")),
        text_of(asked.get("waiting")),
        "-" if rate is None else f"{rate:.1f}",
        text_of(totals.get("requests")),
        text_of(totals.get("completion_tokens")),
        share(totals, "accepted_draft_tokens", "proposed_draft_tokens"),
    )
