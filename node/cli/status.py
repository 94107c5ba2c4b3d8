"""`exo-node status`: the node, its cluster and where models run."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...placement.cluster import layer_range
from . import output
from .client import call, connect
from .flags import AsJson, DataDir, LocalPort
from .load import held_options_text
from .output import Json, caches_text, share, size, table, text_of, texts

NO_MODEL: Final = "no model is loaded; `exo-node chat` loads one"

_NOTHING: Final[Json] = {}


def status(port: LocalPort = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show the node, its cluster and where models run."""
    endpoint = connect(port, data_dir)
    state: dict[str, Any] = {
        "cluster": call(endpoint, "/v1/cluster"),
        "placements": call(endpoint, "/v1/placements").get("data", []),
        "answered": call(endpoint, "/v1/mtp/stats").get("models", {}),
    }
    if as_json:
        output.print_json(state)
        return
    asking = call(endpoint, "/v1/join/requests").get("data", [])
    print(status_text(**state, width=output.terminal_width(), asking=asking))


def status_text(
    cluster: Json,
    placements: Sequence[Json],
    answered: Mapping[str, Json] = _NOTHING,
    width: int | None = None,
    asking: Sequence[Json] = (),
) -> str:
    """The node, its head and cluster; tables of nodes, placements and this node's answers.

    `asking`: the nodes that ask to join.
    """
    nodes: list[Json] = cluster.get("nodes", [])
    names = {node.get("id"): str(node.get("name", node.get("id"))) for node in nodes}
    me = next((node for node in nodes if node.get("self")), _NOTHING)
    head = cluster.get("head")
    lines = [
        f"node     {text_of(me.get('name'))} ({text_of(cluster.get('self'))}), "
        f"http://{text_of(me.get('http_host'))}:{text_of(me.get('http_port'))}, "
        f"exo-node {text_of(cluster.get('version'))}",
        f"head     {names.get(head, text_of(head))}, term {text_of(cluster.get('term'))}",
        f"cluster  {text_of(cluster.get('cluster'))}, {len(nodes)} node{'s'[: len(nodes) != 1]}",
    ]
    if asking:
        applicants = ", ".join(text_of(each.get("name")) for each in asking)
        lines.append(
            f"asking   {applicants}; `exo-node nodes` shows who asks to join, and how to answer"
        )
    if cluster.get("trouble"):
        lines.append(f"TROUBLE  {text_of(cluster['trouble'])}")
    if cluster.get("offline"):
        lines.append(f"offline  {offline_text(cluster['offline'])}")
    header = ("NODE", "STATUS", "CHIP", "BACKEND", "MEMORY", "ADDRESS")
    lines += ["", *table(header, map(node_row, nodes), width=width), ""]
    if not placements:
        return output.joined([*lines, NO_MODEL])
    rows = [placement_row(placement, names) for placement in placements]
    lines += table(("MODEL", "STATUS", "STAGES", "MTP"), rows, width=width)
    options = {str(each.get("model")): held_options_text(each) for each in placements}
    lines += [f"{text_of(model)} is {text}" for model, text in options.items() if text]
    if answered:
        header = (
            *("ANSWERED HERE", "ANSWERS", "TOKENS"),
            *("PROMPTS CACHED", "SHARED STEPS", "ACCEPTED"),
        )
        rows = [_totals_row(*each) for each in answered.items()]
        lines += ["", *table(header, rows, width=width)]
    return output.joined(lines)


def offline_text(setting: object) -> str:
    """The effect of EXO_OFFLINE or HF_HUB_OFFLINE, whichever `setting` is."""
    return (
        f"nothing is downloaded, by {text_of(setting)}; models come from this disk and from peers"
    )


def node_row(node: Json) -> tuple[str, ...]:
    """Name with marks, status, chip, backend, memory and address of a node."""
    return (
        marked_name(node),
        *texts(node, "status", "chip", "backend"),
        size(node.get("memory_bytes")),
        f"{text_of(node.get('host'))}:{text_of(node.get('port'))}",
    )


def marked_name(node: Json) -> str:
    """`alpha (self, head)`."""
    marks = [mark for mark in ("self", "head") if node.get(mark)]
    return text_of(node.get("name")) + (f" ({', '.join(marks)})" if marks else "")


def placement_row(placement: Json, names: Mapping[Any, str]) -> tuple[str, str, str, str]:
    """Model, status with the bits of quantised caches, stages with their layers, drafting; `names`
    by node id."""
    state = text_of(placement.get("status")) + caches_text(placement)
    if speed := placement.get("tokens_per_second"):
        state += f", about {speed:g} tok/s"
    if placement.get("error"):
        state += f": {placement['error']}"
    stages = [
        f"{names.get(stage.get('node'), text_of(stage.get('node')))} {_layers(stage)}"
        for stage in placement.get("stages", [])
    ]
    stages[-1:] = [" + ".join([*stages[-1:], *_readers(placement, names)])]
    drafting = _drafting(placement.get("drafting"))
    return text_of(placement.get("model")), state, " → ".join(stages), drafting


def _readers(placement: Json, names: Mapping[Any, str]) -> list[str]:
    """The nodes that only read prompts for it, with their layers."""
    return [
        f"{names.get(each.get('node'), text_of(each.get('node')))} reads {_layers(each)}"
        for each in placement.get("readers", [])
    ]


def _totals_row(model: str, totals: Json) -> tuple[str, ...]:
    """Counts, then shares of the prompt tokens, the emitted tokens and the drafts."""
    return (
        model,
        *texts(totals, "requests", "completion_tokens"),
        share(totals, "cached_tokens", "prompt_tokens"),
        share(totals, "batched_tokens", "completion_tokens"),
        share(totals, "accepted_draft_tokens", "proposed_draft_tokens"),
    )


def _layers(stage: Json) -> str:
    """`layers 0-15` from the API's half-open range."""
    layers = stage.get("layers")
    return layer_range(*layers) if layers else "?"


def _drafting(drafting: Json | None) -> str:
    if drafting is None:
        return "-"
    copies: Json = drafting.get("prompt_lookup") or {}
    refusal = f"; no copies: {copies['reason']}" if copies.get("reason") else ""
    if drafting.get("drafter_kind") == "none":
        reason = drafting.get("reason") or "no reason given"
        return f"copies only: {reason}" if copies.get("enabled") else f"off: {reason}{refusal}"
    upto = "up to " if drafting.get("draft_policy") == "adaptive" else ""
    depth = f"; {drafting['depth_reason']}" if drafting.get("depth_reason") else ""
    also = ", and copies" if copies.get("enabled") else ""
    drafts = f"{upto}{text_of(drafting.get('num_draft_tokens'))} a round"
    return f"on, {drafts}{also}{depth}{refusal}"
