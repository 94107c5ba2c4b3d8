"""One reading of a node, and what `exo-node top` shows of it: no I/O, time comes as an argument."""

import re
import textwrap
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
_LEAST_CELL: Final = 12
"""Names are cut no shorter: a terminal that is narrower still cuts lines at its edge."""
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


def shown(told: Json, clock: str, trouble: str = "", width: int | None = None) -> str:
    """The text of a snapshot, in lines of at most `width` characters where one is given.

    `trouble` says why there is none newer.
    """
    cluster: Json = told["cluster"]
    nodes: list[Json] = cluster.get("nodes", [])
    names = {node.get("id"): text_of(node.get("name", node.get("id"))) for node in nodes}
    head = cluster.get("head")
    lines = [
        f"{names.get(cluster.get('self'), '-')}, exo-node {text_of(cluster.get('version'))}, "
        f"{len(nodes)} node{'s'[: len(nodes) != 1]}, "
        f"head {names.get(head, text_of(head))}  {clock}"
    ]
    for each in filter(None, (trouble, cluster.get("trouble"))):
        lines += _wrapped(f"TROUBLE  {text_of(each)}", width)
    rows = [_node_row(node, told["loads"][str(node.get("id"))]) for node in nodes]
    heads = ("NODE", "STATUS", "MODELS HOLD", "OF MEMORY", "LIVE REQUESTS")
    lines += ["", *_fitting(heads, rows, width, (0,)), ""]
    if told["placements"]:
        lines += _placements(told["placements"], names, width)
    else:
        lines.append("no model is loaded; `exo-node chat` loads one")
    if models := sorted({*told["requests"], *told["answered"]}):
        heads = ("ASKED HERE", "RUNNING", "WAITING", "TOKENS/S", "ANSWERS", "TOKENS", "ACCEPTED")
        rows = [_model_row(model, told) for model in models]
        lines += ["", *_fitting(heads, rows, width, (0,))]
    return "\n".join(escape_controls(line) for line in lines)


def _placements(
    placements: Sequence[Json], names: Mapping[Any, str], width: int | None
) -> list[str]:
    """A table with a word for each state, and below it whole sentences: what failed, why no MTP."""
    rows, notes = list[tuple[str, ...]](), list[str]()
    for placement in placements:
        model, status, stages, mtp = placement_row(placement, names)
        state, _, error = status.partition(": ")
        switch, _, reason = mtp.partition(": ")
        rows.append((model, state, stages, switch))
        notes += [f"{model}: {error}"] if error else []
        notes += [f"{model}: MTP off: {reason}"] if reason else []
    lines = _fitting(("MODEL", "STATUS", "STAGES", "MTP"), rows, width, (2, 0))
    return lines + [line for note in notes for line in _wrapped(note, width)]


def _fitting(
    heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], width: int | None, names: Sequence[int]
) -> list[str]:
    """A table whose columns `names` are cut, in this order, as far as its width asks for."""
    told = [tuple(escape_controls(cell) for cell in row) for row in rows]
    for column in names:
        over = max(len(line) for line in table(heads, told)) - (width or 1 << 30)
        if over > 0:
            most = max(len(row[column]) for row in (heads, *told))
            room = max(_LEAST_CELL, most - over)
            told = [(*row[:column], _cut(row[column], room), *row[column + 1 :]) for row in told]
    return table(heads, told)


def _cut(cell: str, room: int) -> str:
    return cell if len(cell) <= room else f"{cell[: room - 1]}…"


def _wrapped(note: str, width: int | None) -> list[str]:
    text = escape_controls(note)
    return [text] if width is None else textwrap.wrap(text, width, subsequent_indent="  ")


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
