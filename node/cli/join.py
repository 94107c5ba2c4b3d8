"""The cluster's members: `exo-node nodes`, `approve`, `deny`, `join`, `key`, `leave`,
`dashboard`."""

import sys
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from ...placement.errors import ExoNodeError, InvalidRequest
from ..machine.node_names import named_node
from . import output
from .client import ApiEndpoint, call, client_settings, connect, find_node
from .flags import AsJson, DataDir, LocalPort, Yes, argument, switch
from .output import Json, confirm, note, table, text_of, texts
from .status import node_row
from .times import TIMES

_Digits = Annotated[
    list[str],
    argument(
        "DIGITS [NAME]",
        "The six digits that the new node shows; its name or id too where several ask.",
    ),
]
_Candidate = Annotated[
    str | None, argument("[NAME]", "A name or id that asks.", show_default=False)
]
_Key = Annotated[
    str, argument("KEY", "The cluster's key (`exo-node key`); - or nothing: it is asked for.")
]
_Again = Annotated[
    bool, switch("Ask the clusters that this node left; no key is needed.", "--again")
]

_REQUESTS: Final = "/v1/join/requests"
_ASKS_NO_MORE: Final = "it does not ask that one again before `exo-node join --again`"


def nodes(port: LocalPort = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the nodes of the cluster, and who asks to join.

    On a new node it shows the digits that let it in.
    """
    endpoint = connect(port, data_dir)
    cluster = call(endpoint, "/v1/cluster")
    joining = call(endpoint, _REQUESTS)
    if as_json:
        output.print_json({"cluster": cluster, "joining": joining})
    else:
        print(nodes_text(cluster, joining, output.terminal_width()))


def approve(digits: _Digits, port: LocalPort = None, data_dir: DataDir = None) -> None:
    """Let a new node in by the six digits that it shows.

    They may have a space within: `exo-node approve 123 456`.
    """
    endpoint = connect(port, data_dir)
    code, name = _parse_digits(digits)
    request = _select_request(endpoint, name)
    path = f"{_REQUESTS}/{request['id']}/approve"
    answer = call(endpoint, path, {"code": code}, timeout_s=TIMES.approve_s)
    note(f"{answer.get('name') or request['name']} is in the cluster")


def deny(node: _Candidate = None, port: LocalPort = None, data_dir: DataDir = None) -> None:
    """Turn a node away that asks to join."""
    endpoint = connect(port, data_dir)
    request = _select_request(endpoint, node or "")
    _ = call(endpoint, f"{_REQUESTS}/{request['id']}/deny", {}, timeout_s=TIMES.approve_s)
    note(f"{request['name']} was turned away")


def join(
    cluster_key: _Key = "-", again: _Again = False, port: LocalPort = None, data_dir: DataDir = None
) -> None:
    """Put this node into the cluster that has the key.

    Other users can read a key on the command line, so rather let it be asked for, or pipe it in.
    A running node joins at once, a stopped one when it is started.
    """
    from ..trust.cluster_key import KeyFolder
    from ..trust.keys import parse_cluster_key

    settings = client_settings(port, data_dir)
    if again and cluster_key != "-":
        raise typer.BadParameter("give either KEY or --again, which needs none")
    if again:
        if endpoint := find_node(settings):
            _ = call(endpoint, "/v1/join/again", {})
        else:
            KeyFolder(settings.data_dir).forget_left_clusters()
        note("the node asks the clusters that it left; `exo-node nodes` shows its digits")
        return
    parsed = parse_cluster_key(_read_key() if cluster_key == "-" else cluster_key, "KEY")
    if endpoint := find_node(settings):
        answer = call(endpoint, "/v1/join/key", {"key": parsed.text})
        note("the node joins it now" if answer.get("changed") else "the node has this key already")
        return
    backup = KeyFolder(settings.data_dir).take(parsed)
    suffix = f"; the old key is kept as {backup.name}" if backup else ""
    note(f"the node on {settings.data_dir} joins when it is started{suffix}")


def key(data_dir: DataDir = None) -> None:
    """Print the cluster's key, by which other nodes join.

    `exo-node join` there takes it. Its holders are trusted like you. It is read from the data
    folder.
    """
    from ..trust.keys import KEY_FILE, load_or_create_cluster_key

    folder = client_settings(None, data_dir).data_dir
    if not (folder / KEY_FILE).exists():
        raise ExoNodeError(
            f"{folder} holds no cluster key: no node was started there yet, or its key comes from "
            "EXO_CLUSTER_KEY or --cluster-key-file"
        )
    print(load_or_create_cluster_key(folder).text)


def leave(yes: Yes = False, port: LocalPort = None, data_dir: DataDir = None) -> None:
    """Take this node out of its cluster.

    It forgets the key and founds a cluster of its own. The old key is kept beside the new one.
    Other nodes are notified, if the node runs.
    """
    from ..trust.cluster_key import KeyFolder
    from ..trust.keys import KEY_FILE

    settings = client_settings(port, data_dir)
    endpoint = find_node(settings)
    if endpoint is None and not (settings.data_dir / KEY_FILE).exists():
        raise ExoNodeError(f"no node was started on {settings.data_dir} yet: it is in no cluster")
    if not yes:
        confirm("Leave the cluster?")
    if endpoint is not None:
        _ = call(endpoint, "/v1/join/leave", {})
        note(f"the node has left its cluster; {_ASKS_NO_MORE}")
        return
    backup = KeyFolder(settings.data_dir).leave()
    note(f"the node has left its cluster; the old key is kept as {backup.name}; {_ASKS_NO_MORE}")


def dashboard(port: LocalPort = None, data_dir: DataDir = None) -> None:
    """Print a link to the dashboard, valid once.

    Within five minutes it lets a browser change things, for good. Other users of this machine reach
    the dashboard as well, and may look and chat there only.
    """
    endpoint = connect(port, data_dir)
    ticket = call(endpoint, "/v1/session/ticket", {})["ticket"]
    print(f"http://{endpoint}/#login={ticket}")


def _parse_digits(words: list[str]) -> tuple[str, str]:
    """The digits, which may be one word or two, and the node's name. Raises InvalidRequest."""
    from ..join.handshake import parse_code, refuse_malformed_code

    for count in (1, 2):
        if (code := parse_code("".join(words[:count]))) is not None:
            return code, " ".join(words[count:])
    raise refuse_malformed_code(" ".join(words))


def _select_request(endpoint: ApiEndpoint, text: str) -> Json:
    """The request of the node with this name or id, or the only one. Raises InvalidRequest.

    Digits are tried with one node alone, because each try reveals something of them to it.
    """
    pending: list[Json] = call(endpoint, _REQUESTS).get("data", [])
    if not pending:
        raise InvalidRequest("no node asks to join this cluster", param="NAME")
    if text:
        return _named(text, pending, "node", "the nodes that ask to join", "NAME")
    if len(pending) == 1:
        return pending[0]
    names = ", ".join(f"{each['name']} ({each['node']})" for each in pending)
    raise InvalidRequest(f"say which node is meant, by its name or id: {names}", param="NAME")


def _read_key() -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline()
    from getpass import getpass

    return getpass("Cluster key: ", stream=sys.stderr)


# ---------------------------------------------------------------------------- texts


def nodes_text(cluster: Json, joining: Json, width: int | None = None) -> str:
    """Tables of the nodes and of those that ask to join; whether this node itself asks."""
    members: list[Json] = cluster.get("nodes", [])
    header = ("NODE", "ID", "STATUS", "CHIP", "BACKEND", "MEMORY", "ADDRESS")
    rows = [(name, text_of(n.get("id")), *rest) for n in members for name, *rest in [node_row(n)]]
    lines = table(header, rows, width=width)
    if pending := joining.get("data"):
        heads = ("ASKS TO JOIN", "ID", "CHIP", "FROM", "AT")
        how = "type the six digits that its own screen shows: `exo-node approve DIGITS`"
        if len(pending) > 1:
            how += " NODE; its screen shows its id too, for where two have one name"
        lines += ["", *table(heads, map(_request_row, pending), width=width), how]
    lines += _own_request_lines(joining)
    if closed := joining.get("not_asked"):
        lines += ["", not_asked_text(closed)]
    return output.joined(lines)


def not_asked_text(closed: Sequence[Json]) -> str:
    """The clusters that this node left, or that turned it away, and the remedy."""
    names = " and ".join(
        f"{text_of(each.get('name'))} ({text_of(each.get('cluster'))})" for each in closed
    )
    return (
        f"this node left the cluster of {names}, or was turned away there, and does not ask it "
        "again: `exo-node join --again` does"
    )


def _request_row(request: Json) -> tuple[str, ...]:
    at: Json = request.get("at") or {}
    return (*texts(request, "name", "node", "chip", "address"), *texts(at, "name"))


def _own_request_lines(joining: Json) -> list[str]:
    """The nodes that a new node asks, and its digits; empty for a member."""
    from ..join.handshake import spaced

    targets: list[Json] = joining.get("asking", [])
    if not targets:
        return []
    names = " and ".join(
        f"{text_of(each.get('name'))} ({text_of(each.get('address'))})" for each in targets
    )
    if (code := joining.get("digits")) is None:
        return ["", f"this node asks {names} to join; only its own user may see its digits"]
    digits = spaced(text_of(code))
    return [
        "",
        f"this node asks {names} to join, and shows {digits}",
        f"run exo-node approve {digits} on a node of your cluster; where several "
        f"ask there, this one's id is {text_of(joining.get('node'))}",
    ]


def _named(text: str, nodes: Sequence[Json], id: str, group: str, param: str) -> Json:
    """The entry of the API that a text means; `id` is the field of its id."""
    return named_node(
        text, nodes, name=lambda n: n["name"], id=lambda n: n[id], group=group, param=param
    )
