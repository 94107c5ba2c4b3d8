"""`exo-node top`: nodes, placements and requests as they are now, refreshed on a terminal."""

import math
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

import typer

from ..machine.log import escape_controls
from . import output
from .client import ApiEndpoint, CallFailed, call, connect, read_text
from .flags import AsJson, DataDir, LocalPort
from .output import Json, share, size, table, terminal_width, text_of, texts
from .status import NO_MODEL, marked_name, placement_row, prefix_table
from .times import TIMES

_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_TOKENS: Final = "vllm:generation_tokens_total"
_STAGE_BYTES: Final = ("weight_bytes", "cache_bytes", "prefix_cache_bytes")

_Once = Annotated[
    bool, typer.Option("--once", help="Print one snapshot, as where stdout is no terminal.")
]


@dataclass(frozen=True, slots=True)
class Reading:
    """A node's responses at `at` seconds of a monotonic clock.

    `totals` by metric and model, from `/metrics`.
    """

    at: float
    cluster: Json
    placements: Sequence[Json]
    answered: Mapping[str, Json]
    totals: Mapping[str, Mapping[str, float]]


def top(
    once: _Once = False, port: LocalPort = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Watch nodes, models, requests and tokens a second.

    Ctrl-C ends it.
    """

    def read() -> Reading:
        return read_node(connect(port, data_dir))  # after a restart it may have another port

    first = read()
    if as_json or once or terminal_width() is None:
        time.sleep(TIMES.top_every_s)  # rates are between two readings
        state = snapshot(read(), first)
        output.print_json(state) if as_json else print(top_text(state, _clock()))
        return
    try:
        _draw(screens(read, first, _clock, terminal_width))
    except KeyboardInterrupt:  # the way to end it
        return


def read_node(endpoint: ApiEndpoint) -> Reading:
    """Reads the node's state once. Raises CallFailed."""
    return Reading(
        cluster=call(endpoint, "/v1/cluster"),
        placements=call(endpoint, "/v1/placements").get("data", []),
        answered=call(endpoint, "/v1/mtp/stats").get("models", {}),
        totals=parse_metrics(read_text(endpoint, "/metrics")),
        at=time.monotonic(),
    )


def parse_metrics(text: str) -> dict[str, dict[str, float]]:
    """Sums by metric and model of the samples that name a model.

    Raises CallFailed where `text` is not in Prometheus' format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, dict[str, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                model = sample.labels.get("model_name")
                if model is not None and math.isfinite(sample.value):
                    by_model = sums.setdefault(sample.name, {})
                    by_model[model] = by_model.get(model, 0.0) + sample.value
    except ValueError as error:
        raise CallFailed(f"the node's metrics cannot be read: {error}") from error
    return sums


def screens(
    read: Callable[[], Reading],
    first: Reading,
    clock: Callable[[], str],
    width: Callable[[], int | None],
) -> Iterator[str]:
    """A text for each reading; after one that failed, the last text again with its time and why.

    `width` returns the terminal's, which may change.
    """
    before, state, at = first, snapshot(first, None), clock()
    yield top_text(state, at, width=width())
    lost = False
    while True:
        try:
            now = read()
        except CallFailed as error:
            lost = True
            trouble = f"{error.what}; asked again, this is of {at}"
            yield top_text(state, at, trouble, width())
            continue
        state, at = snapshot(now, None if lost else before), clock()
        before, lost = now, False
        yield top_text(state, at, width=width())


def _draw(texts: Iterator[str]) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as live:
        for text in texts:
            live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)
            time.sleep(TIMES.top_every_s)


def _clock() -> str:
    return datetime.now().strftime("%H:%M:%S")


# ---------------------------------------------------------------------------- a snapshot


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


def _load(node: Json) -> dict[str, int]:
    """The bytes that stages hold on a node, and the requests that they work on."""
    stages: list[Json] = node.get("stages", [])
    return {
        "held_bytes": sum(stage.get(part) or 0 for stage in stages for part in _STAGE_BYTES),
        "live_requests": sum(stage.get("live_requests") or 0 for stage in stages),
    }


def _requests(reading: Reading, before: Reading | None) -> dict[str, dict[str, Any]]:
    """Requests to this node and the tokens that it emits a second, by model."""
    running, waiting, tokens = (
        reading.totals.get(name, {}) for name in (_RUNNING, _WAITING, _TOKENS)
    )
    old: Mapping[str, float] = {} if before is None else before.totals.get(_TOKENS, {})
    return {
        model: {
            "running": round(running.get(model, 0)),
            "waiting": round(waiting.get(model, 0)),
            "tokens_per_second": None
            if before is None
            else _rate(tokens.get(model, 0.0), old.get(model, 0.0), reading.at - before.at),
        }
        for model in sorted({*running, *waiting, *tokens})
    }


def _rate(now: float, before: float, seconds: float) -> float | None:
    """None where a counter decreased: it belongs to a new process."""
    return (now - before) / seconds if now >= before and seconds > 0 else None


# ---------------------------------------------------------------------------- its text


def top_text(state: Json, clock: str, trouble: str = "", width: int | None = None) -> str:
    """The text of a snapshot, in lines of at most `width` characters where one is given.

    `trouble`: why there is none newer.
    """
    cluster: Json = state["cluster"]
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
    header = ("NODE", "STATUS", "MODELS HOLD", "OF MEMORY", "LIVE REQUESTS")
    rows = [_node_row(node, state["loads"][str(node.get("id"))]) for node in nodes]
    lines += ["", *table(header, rows, width=width, one_line=True), ""]
    if state["placements"]:
        lines += _placements(state["placements"], names, width)
    else:
        lines.append(NO_MODEL)
    if models := sorted({*state["requests"], *state["answered"]}):
        header = ("ASKED HERE", "RUNNING", "WAITING", "TOKENS/S", "ANSWERS", "TOKENS", "ACCEPTED")
        rows = [_model_row(model, state) for model in models]
        lines += ["", *table(header, rows, width=width, one_line=True)]
    return output.joined([*lines, *prefix_table(nodes, width, one_line=True)])


def _placements(
    placements: Sequence[Json], names: Mapping[Any, str], width: int | None
) -> list[str]:
    """A table with a word for each state; below it in full sentences: failures, why no MTP."""
    rows, notes = list[tuple[str, ...]](), list[str]()
    for placement in placements:
        model, status, stages, mtp = placement_row(placement, names)
        state, _, error = status.partition(": ")
        is_on = mtp.startswith("on,")
        switch, _, reason = mtp.partition("; " if is_on else ": ")
        rows.append((model, state, stages, switch))
        notes += [f"{model}: {error}"] if error else []
        notes += [f"{model}: MTP off: {reason}"] if reason and not is_on else []
    lines = table(("MODEL", "STATUS", "STAGES", "MTP"), rows, width=width, one_line=True)
    return lines + [line for note in notes for line in _wrapped(note, width)]


def _wrapped(note: str, width: int | None) -> list[str]:
    text = escape_controls(note)
    return [text] if width is None else textwrap.wrap(text, width, subsequent_indent="  ")


def _node_row(node: Json, load: Mapping[str, int]) -> tuple[str, ...]:
    return (
        marked_name(node),
        text_of(node.get("status")),
        size(load["held_bytes"]),
        size(node.get("memory_bytes")),
        str(load["live_requests"]),
    )


def _model_row(model: str, state: Json) -> tuple[str, ...]:
    requests: Json = state["requests"].get(model, {})
    totals: Json = state["answered"].get(model, {})
    rate = requests.get("tokens_per_second")
    return (
        model,
        *texts(requests, "running", "waiting"),
        "-" if rate is None else f"{rate:.1f}",
        *texts(totals, "requests", "completion_tokens"),
        share(totals, "accepted_draft_tokens", "proposed_draft_tokens"),
    )
