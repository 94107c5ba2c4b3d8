"""`exo-node bench cluster`: what the nodes and the links between them were measured to do."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..machine.log import escape_controls
from ..machine.settings import environment, load_client_settings
from . import client as cli_client
from . import plan as cli_plan
from .output import table

_PATH = "/v1/cluster/profile"
_MEASURE_LIMIT_S = 300.0

Json = Mapping[str, Any]


def bench_cluster(
    *, model: str | None, measure: bool, port: str | None, data_dir: str | None, as_json: bool
) -> None:
    """Prints the tables, or the same as JSON. Raises CallFailed."""
    settings = load_client_settings({"port": port, "data_dir": data_dir}, environment())
    endpoint = cli_client.locate(settings)
    body: dict[str, Any] | None = {} if measure else None
    profile = cli_client.call(endpoint, _PATH, body, timeout_s=_MEASURE_LIMIT_S)
    plan = None if model is None else cli_client.call(endpoint, cli_plan.query(model, {}))
    if as_json:
        print(json.dumps({"profile": profile, "plan": plan}, indent=2))
        return
    parts = [told(profile)]
    if plan is not None:
        parts.append(cli_plan.told(plan))
    print("\n\n".join(parts))


def told(profile: Json) -> str:
    """The profile for a terminal: nodes, layers of each model, links, and what must stay whole."""
    nodes: Sequence[Json] = profile.get("nodes", [])
    links: Sequence[Json] = profile.get("links", [])
    names = {node["id"]: str(node["name"]) for node in nodes}
    lines = [
        *table(("NODE", "CHIP", "BACKEND", "MEMORY", "BANDWIDTH", "ADDRESSES"), map(_node, nodes)),
        "",
        *_layers(nodes),
        "",
        *_links(links, names, len(nodes)),
        *_refusals(nodes),
    ]
    return "\n".join(escape_controls(line) for line in lines)


def _node(node: Json) -> tuple[str, ...]:
    bandwidth = node["memory_bandwidth"]
    return (
        str(node["name"]),
        str(node["chip"]),
        str(node["backend"]),
        f"{node['memory_bytes'] / 1e9:.1f} GB",
        f"{bandwidth / 1e9:.0f} GB/s" if bandwidth else "-",
        ", ".join(map(str, node["addresses"])),
    )


def _layers(nodes: Sequence[Json]) -> list[str]:
    """A row for each model that a node has measured."""
    measured = [(node, times) for node in nodes for times in node["layers"]]
    if not measured:
        return ["no model was timed yet: that happens when a node loads one for the first time"]
    header = ("MODEL", "NODE", "DTYPE", "1 ROW", "VERIFY", "CHUNK", "TAIL")
    rows = [
        (
            str(times["model"]),
            str(node["name"]),
            str(times["dtype"]),
            _ms(times["decode_s"]),
            f"{_ms(times['verify_s'])} ({times['verify_rows']} rows)",
            f"{_ms(times['prefill_s'])} ({times['prefill_rows']} rows)",
            _ms(times["tail_s"]),
        )
        for node, times in measured
    ]
    rows.sort()
    note = "ms for one layer; the tail is final norm and lm_head, timed on a generator"
    return [*table(header, rows), note]


def _links(links: Iterable[Json], names: Mapping[str, str], nodes: int) -> list[str]:
    rows = [
        (
            " - ".join(names.get(node, str(node)) for node in link["nodes"]),
            " - ".join(map(str, link["addresses"])),
            _ms(link["round_trip_min_s"]),
            _ms(link["round_trip_s"]),
            f"{link['bandwidth'] / 1e6:.0f} MB/s" if link["bandwidth"] else "-",
            f"{link['age_s']} s",
            "yes" if link["chosen"] else "",
        )
        for link in links
    ]
    if not rows:
        return [] if nodes < 2 else ["no link was measured yet: try again in a moment"]
    header = ("LINK", "ADDRESSES", "RTT MIN", "RTT P50", "BANDWIDTH", "AGE", "USED")
    return [*table(header, rows), "round trips in ms; stages talk over the links that are used"]


def _refusals(nodes: Sequence[Json]) -> list[str]:
    told = {model: why for node in nodes for model, why in node["split_refusals"].items()}
    return [f"{model} runs on one node only: {why}" for model, why in sorted(told.items())]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.3g}"
