"""`exo-node token`: keys for clients, each with a name and revoked alone; no node has to run."""

import json
from typing import Annotated, Any

import typer

from ..trust.token_file import TOKENS_FILE, create_token, read_tokens, read_uses, revoke_token
from .flags import AsJson, DataDir, client_settings, group
from .output import minute, note, print_json, print_table

token = group("Make and revoke keys for clients.")

_Name = Annotated[str, typer.Argument(metavar="NAME", help="What you call the token.")]


@token.command()
def create(name: _Name, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Make a token and print it, this once; clients send it as their API key.

    From the first one on, the node asks every client for a token or for EXO_API_KEY. A running node
    knows it at once.
    """
    text = create_token(client_settings(None, data_dir).data_dir, name)
    if as_json:
        print(json.dumps({"name": name, "token": text}))
        return
    print(text)
    note("keep it: it is stored nowhere and not shown again")


@token.command("list")
def list_tokens(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the tokens by name, with the minute of their last use."""
    folder = client_settings(None, data_dir).data_dir
    uses = read_uses(folder)
    tokens: list[dict[str, Any]] = [
        {
            "name": each.name,
            "created": minute(each.created),
            "last_used": minute(uses[each.id]) if each.id in uses else None,
        }
        for each in read_tokens(folder) or ()
    ]
    if as_json:
        print_json({"data": tokens})
    elif not tokens:
        note("there is no token; `exo-node token create NAME` makes one")
    else:
        rows = [(each["name"], each["created"], each["last_used"] or "never") for each in tokens]
        print_table(("NAME", "CREATED", "LAST USED"), rows)


@token.command()
def revoke(name: _Name, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Take a token back: the next request with it is refused, also by a running node."""
    folder = client_settings(None, data_dir).data_dir
    remaining = revoke_token(folder, name)
    if as_json:
        print(json.dumps({"revoked": name, "left": remaining}))
        return
    note(f"revoked '{name}'")
    if not remaining:
        note(
            "no token is left, and the node asks for a key still; to ask for none, stop it, "
            f"remove {folder / TOKENS_FILE} and start it"
        )
