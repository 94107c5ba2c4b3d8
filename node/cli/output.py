"""What the commands print for a person, from the API's objects.

Text comes from models and other machines, so it may not send a terminal escape sequences. Fields
that another version of the node leaves out show as `-`.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ...placement.cluster import layer_range
from ..join.handshake import spaced
from ..machine.log import escape_controls
from ..machine.node_names import meant_nodes
from .client import Comment

_NOTHING: Final[Mapping[str, Any]] = {}


def status(
    cluster: Mapping[str, Any],
    placements: Sequence[Mapping[str, Any]],
    answered: Mapping[str, Mapping[str, Any]] = _NOTHING,
) -> str:
    """The node, its head and cluster; tables of nodes, placements and what this node answered."""
    nodes: list[Mapping[str, Any]] = cluster.get("nodes", [])
    names = {node.get("id"): str(node.get("name", node.get("id"))) for node in nodes}
    me = next((node for node in nodes if node.get("self")), _NOTHING)
    head = cluster.get("head")
    trouble = [f"TROUBLE  {text_of(cluster['trouble'])}"] if cluster.get("trouble") else []
    offline = [offline_words(cluster["offline"])] if cluster.get("offline") else []
    lines = [
        f"node     {text_of(me.get('name'))} ({text_of(cluster.get('self'))}), "
        f"http://{text_of(me.get('http_host'))}:{text_of(me.get('http_port'))}, "
        f"exo-node {text_of(cluster.get('version'))}",
        f"head     {names.get(head, text_of(head))}, term {text_of(cluster.get('term'))}",
        f"cluster  {text_of(cluster.get('cluster'))}, {len(nodes)} node{'s'[: len(nodes) != 1]}",
        *trouble,
        *(f"offline  {each}" for each in offline),
        "",
        *table(("NODE", "STATUS", "CHIP", "BACKEND", "MEMORY", "ADDRESS"), map(_node_row, nodes)),
        "",
    ]
    if not placements:
        return _joined([*lines, "no model is loaded; `exo-node chat` loads one"])
    rows = [placement_row(placement, names) for placement in placements]
    lines += table(("MODEL", "STATUS", "STAGES", "MTP"), rows)
    if answered:
        heads = ("ANSWERED HERE", "ANSWERS", "TOKENS", "PROMPTS CACHED", "SHARED STEPS", "ACCEPTED")
        lines += ["", *table(heads, [_answered_row(*each) for each in answered.items()])]
    return _joined(lines)


def offline_words(setting: object) -> str:
    """What a node does not do because of EXO_OFFLINE or HF_HUB_OFFLINE."""
    return (
        f"nothing is downloaded, by {text_of(setting)}; models come from this disk and from peers"
    )


def nodes(cluster: Mapping[str, Any], joining: Mapping[str, Any]) -> str:
    """A table of the nodes, one of those that ask to join, and whom this node asks itself."""
    members: list[Mapping[str, Any]] = cluster.get("nodes", [])
    header = ("NODE", "ID", "STATUS", "CHIP", "BACKEND", "MEMORY", "ADDRESS")
    rows = [(row[0], text_of(n.get("id")), *row[1:]) for n in members for row in [_node_row(n)]]
    lines = table(header, rows)
    if pending := joining.get("data"):
        heads = ("ASKS TO JOIN", "ID", "CHIP", "FROM", "AT")
        asking = [_asking_row(request) for request in pending]
        how = "type the six digits that its own screen shows: `exo-node approve DIGITS`"
        same = "; its screen shows its id too, for where two have one name"
        lines += ["", *table(heads, asking), f"{how} NODE{same}" if len(asking) > 1 else how]
    lines += _own_asking(joining)
    if joining.get("open"):
        lines += ["", "OPEN: nodes with the same --open join without approval"]
    return _joined(lines)


def _own_asking(joining: Mapping[str, Any]) -> list[str]:
    """Of a new node: where it asks, and its digits."""
    asked: list[Mapping[str, Any]] = joining.get("asking", [])
    if not asked:
        return []
    whom = " and ".join(
        f"{text_of(each.get('name'))} ({text_of(each.get('address'))})" for each in asked
    )
    if (code := joining.get("digits")) is None:
        return ["", f"this node asks {whom} to join; only its own user may see its digits"]
    return [
        "",
        f"this node asks {whom} to join, and shows {spaced(text_of(code))}",
        f"run `exo-node approve {spaced(text_of(code))}` on a node of your cluster; where several "
        f"ask there, this one's id is {text_of(joining.get('node'))}",
    ]


def _asking_row(request: Mapping[str, Any]) -> tuple[str, ...]:
    at = request.get("at") or _NOTHING
    told = [text_of(request.get(name)) for name in ("name", "node", "chip", "address")]
    return (*told, text_of(at.get("name")))


def no_choice(
    text: str, pending: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]
) -> str:
    """Why a name, an id or nothing does not say which node is meant."""
    if not pending:
        return "no node asks to join this cluster"
    listed = ", ".join(f"{text_of(r.get('name'))} ({text_of(r.get('node'))})" for r in pending)
    if not text or found:
        return f"say which node is meant, by its name or id: {listed}"
    return f"'{text[:64]}' asks nothing; {listed} do"


def rekey_question(cluster: Mapping[str, Any], without: Sequence[str]) -> str:
    """What a person is asked before the cluster key is changed."""
    others = [n for n in cluster.get("nodes", []) if not n.get("self")]
    meant = [n for text in without for n in meant_nodes(text, others, name=_name, id=_id)]
    out = [n for n in others if n in meant or n.get("status") != "alive"]
    stay = ", ".join(text_of(n.get("name")) for n in others if n not in out) or "no other node"
    left = (
        ", ".join(f"{text_of(n.get('name'))} ({text_of(n.get('status'))})" for n in out) or "nobody"
    )
    return escape_controls(f"Give a new cluster key to this node and {stay}, and leave out {left}?")


def _name(node: Mapping[str, Any]) -> str:
    return str(node.get("name"))


def _id(node: Mapping[str, Any]) -> str:
    return str(node.get("id"))


def rekeyed(answer: Mapping[str, Any]) -> str:
    """What became of a new cluster key."""
    kept = ", ".join(answer.get("kept", []))
    who = f"this node and {kept} restart" if kept else "this node restarts"
    text = f"{who} with the new cluster key once running answers have ended"
    if missed := answer.get("missed"):
        text += (
            f"; {', '.join(missed)} did not get it: run `exo-node join` there with the key that "
            "`exo-node key` prints here"
        )
    return text


def print_answer(events: Iterable[dict[str, Any] | Comment]) -> Mapping[str, Any] | None:
    """Write a stream's deltas to stdout as they come; the final stats, if the node sent them."""
    stats: Mapping[str, Any] | None = None
    last, progress = "\n", _Progress()
    try:
        for event in events:
            if isinstance(event, Comment):
                progress.show(event.text, below=last != "\n")
                continue
            if not _is_heartbeat(event):
                progress.clear()
            stats = event.get("generation_stats") or stats
            for choice in event.get("choices", []):
                text: str = choice.get("delta", {}).get("content") or ""
                last = text[-1:] or last
                print(_for_stdout(text), end="", flush=True)
    finally:
        if last != "\n":
            print(flush=True)
    return stats


def _is_heartbeat(event: Mapping[str, Any]) -> bool:
    """Whether a chunk of a stream has no news: what is waited for stays on the screen."""
    choices: Sequence[Mapping[str, Any]] = event.get("choices") or ()
    return bool(choices) and not any(c.get("delta") or c.get("finish_reason") for c in choices)


def stats_line(stats: Mapping[str, Any]) -> str:
    """`generation_stats` in one line."""
    kind = text_of(stats.get("drafter_kind"))
    if kind == "none":
        parts = [f"drafter none ({stats.get('drafting_reason') or 'no reason given'})"]
    else:
        accepted, proposed = stats.get("accepted_draft_tokens"), stats.get("proposed_draft_tokens")
        parts = [f"drafter {kind}", f"K {text_of(stats.get('num_draft_tokens'))}"]
        parts.append(f"accepted {text_of(accepted)}/{text_of(proposed)}")
    parts.append(f"{stats.get('generation_tps') or 0:.1f} tok/s")
    parts.append(f"TTFT {stats.get('time_to_first_token_s') or 0:.2f} s")
    if cached := stats.get("cached_tokens"):
        parts.append(f"{text_of(cached)} prompt tokens cached")
    if stats.get("batched_tokens"):
        parts.append(f"{text_of(round(stats.get('batch_size') or 1, 1))} requests a step")
    if resumes := stats.get("resumes"):
        exact = "exact" if stats.get("resume_exact") else "not exact"
        parts.append(f"resumed {text_of(resumes)}x, {exact}")
    return escape_controls(", ".join(parts))


class _Progress:
    """One line that is written over, on a terminal."""

    def __init__(self) -> None:
        self._shown = 0

    def show(self, text: str, *, below: bool) -> None:
        """`below`: an answer's line is not at its end, and must not be written over."""
        if not text or not sys.stderr.isatty():
            return
        begin = "\n" if below and not self._shown else "\r"
        text = escape_controls(text)
        print(f"{begin}{text.ljust(self._shown)}", end="", file=sys.stderr, flush=True)
        self._shown = len(text)

    def clear(self) -> None:
        if self._shown:
            print(f"\r{' ' * self._shown}\r", end="", file=sys.stderr, flush=True)
        self._shown = 0


def _for_stdout(text: str) -> str:
    return escape_controls(text, keep="\n\t") if sys.stdout.isatty() else text


def _node_row(node: Mapping[str, Any]) -> tuple[str, ...]:
    marks = [mark for mark in ("self", "head") if node.get(mark)]
    return (
        text_of(node.get("name")) + (f" ({', '.join(marks)})" if marks else ""),
        text_of(node.get("status")),
        text_of(node.get("chip")),
        text_of(node.get("backend")),
        size(node.get("memory_bytes")),
        f"{text_of(node.get('host'))}:{text_of(node.get('port'))}",
    )


def placement_row(
    placement: Mapping[str, Any], names: Mapping[Any, str]
) -> tuple[str, str, str, str]:
    """Model, status, stages with their layers, drafting; `names` by node id."""
    state = text_of(placement.get("status"))
    if placement.get("error"):
        state += f": {placement['error']}"
    stages = [
        f"{names.get(stage.get('node'), text_of(stage.get('node')))} {_layers(stage)}"
        for stage in placement.get("stages", [])
    ]
    drafting = _drafting(placement.get("drafting"))
    return text_of(placement.get("model")), state, " → ".join(stages), drafting


def _answered_row(model: str, totals: Mapping[str, Any]) -> tuple[str, ...]:
    """Shares of prompt tokens, of emitted tokens and of drafts."""
    return (
        escape_controls(model),
        text_of(totals.get("requests")),
        text_of(totals.get("completion_tokens")),
        share(totals, "cached_tokens", "prompt_tokens"),
        share(totals, "batched_tokens", "completion_tokens"),
        share(totals, "accepted_draft_tokens", "proposed_draft_tokens"),
    )


def share(totals: Mapping[str, Any], part: str, whole: str) -> str:
    """A cell such as `67 %`."""
    count = totals.get(whole)
    return f"{100 * (totals.get(part) or 0) / count:.0f} %" if count else "-"


def _layers(stage: Mapping[str, Any]) -> str:
    """As plans have them; the API has the half-open range."""
    layers = stage.get("layers")
    return layer_range(*layers) if layers else "?"


def size(value: object) -> str:
    """Bytes in decimal units, as disks are sold."""
    if not isinstance(value, int):
        return "-"
    return f"{value / 1e9:.1f} GB" if value >= 10**8 else f"{value / 1e6:.0f} MB"


def _drafting(drafting: Mapping[str, Any] | None) -> str:
    if drafting is None:
        return "-"
    if drafting.get("drafter_kind") == "none":
        return f"off: {drafting.get('reason') or 'no reason given'}"
    return f"on, K {text_of(drafting.get('num_draft_tokens'))}"


def text_of(value: object) -> str:
    """A cell of a table."""
    return "-" if value is None else str(value)


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of padded columns; cells may hold anything."""
    lines = [header, *(tuple(escape_controls(cell) for cell in row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    return [line.rstrip() for line in padded]


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(escape_controls(line) for line in lines)
