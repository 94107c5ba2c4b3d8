"""`exo-node token`: keys for clients, each with a name and revoked alone; no node has to run."""

import json
import sys
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from .flags import AsJson, DataDir, client_settings

token = typer.Typer(
    no_args_is_help=True, help="Make and revoke keys for clients.", rich_markup_mode=None
)

_Name = Annotated[str, typer.Argument(metavar="NAME", help="What you call the token.")]
_NEVER: Final = "never"


@token.command()
def create(name: _Name, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Make a token and print it, this once; clients send it as their API key.

    From the first one on, the node asks every client for a token or for EXO_API_KEY. A running node
    knows it at once.
    """
    from ..trust.token_file import create_token

    made = create_token(client_settings(None, data_dir).data_dir, name)
    if as_json:
        print(json.dumps({"name": name, "token": made}))
        return
    print(made)
    print("keep it: it is stored nowhere and not shown again", file=sys.stderr)


@token.command("list")
def list_tokens(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the tokens by name, with the minute of their last use."""
    from ..trust.token_file import read_tokens, read_uses
    from .output import table

    folder = client_settings(None, data_dir).data_dir
    uses = read_uses(folder)
    found: list[dict[str, Any]] = [
        {"name": each.name, "created": _time(each.created), "last_used": _time(uses.get(each.id))}
        for each in read_tokens(folder) or ()
    ]
    if as_json:
        print(json.dumps({"data": found}, indent=2))
    elif not found:
        print("there is no token; `exo-node token create NAME` makes one", file=sys.stderr)
    else:
        rows = [(each["name"], each["created"], each["last_used"] or _NEVER) for each in found]
        print("\n".join(table(("NAME", "CREATED", "LAST USED"), rows)))


@token.command()
def revoke(name: _Name, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Take a token back: the next request with it is refused, also by a running node."""
    from ..trust.token_file import TOKENS_FILE, revoke_token

    folder = client_settings(None, data_dir).data_dir
    left = revoke_token(folder, name)
    if as_json:
        print(json.dumps({"revoked": name, "left": left}))
        return
    print(f"revoked '{name}'", file=sys.stderr)
    if not left:
        print(
            "no token is left, and the node asks for a key still; to ask for none, stop it, "
            f"remove {folder / TOKENS_FILE} and start it",
            file=sys.stderr,
        )


def _time(at: int | None) -> str | None:
    """To the minute, in UTC; a time beyond all calendars is none."""
    if at is None:
        return None
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%MZ")
    except (OverflowError, ValueError):
        return "?"
