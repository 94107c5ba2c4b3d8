"""`exo-node nodes`, `approve`, `deny`, `join`, `key` and `leave`: who is in the cluster."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ...placement.errors import ExoNodeError, InvalidRequest, InvalidSettings
from ..machine.node_names import meant_nodes
from .flags import AsJson, DataDir, LocalPort, client_settings

if TYPE_CHECKING:
    from .client import Endpoint

_Digits = Annotated[
    list[str],
    typer.Argument(
        metavar="DIGITS [NODE]",
        help="The six digits that the new node shows; its name or id too where several ask.",
    ),
]
_Asking = Annotated[
    str | None, typer.Argument(metavar="[NODE]", help="A name or id that asks.", show_default=False)
]

_REQUESTS: Final = "/v1/join/requests"
_APPROVE_S: Final = 30.0
_REKEY_S: Final = 120.0


def add_join_commands(app: typer.Typer) -> None:
    """Adds this file's commands."""
    for command in (nodes, approve, deny, join, key, leave, rekey, dashboard):
        _ = app.command()(command)


def nodes(port: LocalPort = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the cluster's nodes and who asks to join; on a new node, the digits that let it in."""
    from . import client as cli_client

    endpoint = cli_client.locate(client_settings(port, data_dir))
    cluster = cli_client.call(endpoint, "/v1/cluster")
    joining = cli_client.call(endpoint, _REQUESTS)
    if as_json:
        _print_json({"cluster": cluster, "joining": joining})
        return
    from . import output as cli_output

    print(cli_output.nodes(cluster, joining))


def approve(digits: _Digits, port: LocalPort = None, data_dir: DataDir = None) -> None:
    """Let a new node into this cluster by the six digits that its own screen shows.

    They may have a space within: `exo-node approve 123 456`.
    """
    from . import client as cli_client

    endpoint = cli_client.locate(client_settings(port, data_dir))
    code, name = _digits_and_name(digits)
    request = _chosen(endpoint, name)
    path = f"{_REQUESTS}/{request['id']}/approve"
    answer = cli_client.call(endpoint, path, {"code": code}, timeout_s=_APPROVE_S)
    _note(f"{answer.get('name') or request['name']} is in the cluster")


def deny(node: _Asking = None, port: LocalPort = None, data_dir: DataDir = None) -> None:
    """Turn a node away that asks to join."""
    from . import client as cli_client

    endpoint = cli_client.locate(client_settings(port, data_dir))
    request = _chosen(endpoint, node or "")
    _ = cli_client.call(endpoint, f"{_REQUESTS}/{request['id']}/deny", {}, timeout_s=_APPROVE_S)
    _note(f"{request['name']} was turned away")


def join(
    cluster_key: Annotated[
        str,
        typer.Argument(
            metavar="KEY", help="The cluster's key (`exo-node key`); - or nothing: it is asked for."
        ),
    ] = "-",
    port: LocalPort = None,
    data_dir: DataDir = None,
) -> None:
    """Put this node into the cluster that has the key.

    Other users can read a key on the command line, so rather let it be asked for, or pipe it in.
    A running node joins at once, a stopped one when it is started.
    """
    from ..machine.data_dir_lock import find_running
    from ..trust.cluster_key import KeyFolder
    from ..trust.keys import parse_cluster_key
    from . import client as cli_client

    settings = client_settings(port, data_dir)
    text = _asked_for() if cluster_key == "-" else cluster_key
    parsed = parse_cluster_key(text, "KEY")
    if settings.port is not None or find_running(settings.data_dir) is not None:
        endpoint = cli_client.locate(settings)
        answer = cli_client.call(endpoint, "/v1/join/key", {"key": parsed.text})
        _note("the node joins it now" if answer.get("changed") else "the node has this key already")
        return
    aside = KeyFolder(settings.data_dir).take(parsed)
    kept = f"; the old key is kept as {aside.name}" if aside else ""
    _note(f"the node on {settings.data_dir} joins when it is started{kept}")


def key(data_dir: DataDir = None) -> None:
    """Print the cluster's key, for `exo-node join` elsewhere. Whoever has it is trusted like you.

    It is read from the data folder.
    """
    from ..trust.keys import KEY_FILE, load_or_create_cluster_key

    folder = client_settings(None, data_dir).data_dir
    if not (folder / KEY_FILE).exists():
        raise ExoNodeError(
            f"{folder} holds no cluster key: no node was started there yet, or its key comes from "
            "EXO_CLUSTER_KEY or --cluster-key-file"
        )
    print(load_or_create_cluster_key(folder).text)


def leave(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    port: LocalPort = None,
    data_dir: DataDir = None,
) -> None:
    """Take this node out of its cluster: it forgets the key and founds a cluster of its own.

    The old key is kept beside the new one. Others are told, if the node runs.
    """
    from ..machine.data_dir_lock import find_running
    from ..trust.cluster_key import KeyFolder
    from . import client as cli_client

    settings = client_settings(port, data_dir)
    if not yes:
        question = "Leave the cluster?"
        if not sys.stdin.isatty():
            raise InvalidSettings(f"{question} If so: add --yes", param="--yes")
        _ = typer.confirm(question, abort=True, err=True)
    if settings.port is not None or find_running(settings.data_dir) is not None:
        _ = cli_client.call(cli_client.locate(settings), "/v1/join/leave", {})
        _note("the node has left its cluster")
        return
    aside = KeyFolder(settings.data_dir).leave()
    _note(f"the node has left its cluster; the old key is kept as {aside.name}")


def rekey(
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            help="A node that stays out: its name, or 8 characters or more of its id. Repeatable.",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask; leave out who cannot be reached.")
    ] = False,
    port: LocalPort = None,
    data_dir: DataDir = None,
) -> None:
    """Give the cluster a new key, so that a lost machine is out of it.

    All nodes that can be reached get it and start anew with it, but those of --without. Answers in
    progress end first. Whoever is left out has to join again.
    """
    from . import client as cli_client
    from . import output as cli_output

    endpoint = cli_client.locate(client_settings(port, data_dir))
    left_out = without or []
    if not yes:
        question = cli_output.rekey_question(cli_client.call(endpoint, "/v1/cluster"), left_out)
        if not sys.stdin.isatty():
            raise InvalidSettings(f"{question} If so: add --yes", param="--yes")
        _ = typer.confirm(question, abort=True, err=True)
    body = {"without": left_out, "drop_absent": True}
    answer = cli_client.call(endpoint, "/v1/join/rekey", body, timeout_s=_REKEY_S)
    _note(cli_output.rekeyed(answer))
    if answer.get("missed"):
        raise ExoNodeError("some nodes have the old key still")


def dashboard(port: LocalPort = None, data_dir: DataDir = None) -> None:
    """Print a link to the dashboard that lets this browser change things, once, for five minutes.

    Other users of this machine reach the dashboard as well, and may look and chat there only.
    """
    from . import client as cli_client

    endpoint = cli_client.locate(client_settings(port, data_dir))
    ticket = cli_client.call(endpoint, "/v1/session/ticket", {})["ticket"]
    print(f"http://{endpoint}/#login={ticket}")


def _digits_and_name(words: list[str]) -> tuple[str, str]:
    """The digits may be one word or two. Raises InvalidRequest."""
    from ..join.handshake import parse_code, refuse_malformed_code

    for count in (1, 2):
        if (code := parse_code("".join(words[:count]))) is not None:
            return code, " ".join(words[count:])
    raise refuse_malformed_code(" ".join(words))


def _chosen(endpoint: "Endpoint", text: str) -> Mapping[str, Any]:
    """The node that asks and that the name or id means, or the only one. Raises InvalidRequest.

    Digits are tried with one node alone: each try tells a wrong one something of them.
    """
    from . import client as cli_client
    from . import output as cli_output

    pending: list[Mapping[str, Any]] = cli_client.call(endpoint, _REQUESTS).get("data", [])
    found = (
        meant_nodes(text, pending, name=lambda r: str(r.get("name")), id=lambda r: str(r["node"]))
        if text
        else pending
    )
    if len(found) == 1:
        return found[0]
    raise InvalidRequest(cli_output.no_choice(text, pending, found), param="NODE")


def _asked_for() -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline()
    from getpass import getpass

    return getpass("Cluster key: ", stream=sys.stderr)


def _print_json(value: Mapping[str, Any]) -> None:
    import json

    print(json.dumps(value, indent=2))


def _note(text: str) -> None:
    from ..machine.log import escape_controls

    print(escape_controls(text), file=sys.stderr, flush=True)
