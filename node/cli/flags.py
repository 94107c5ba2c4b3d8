"""Flags that several commands share."""

from typing import Annotated, Any

import typer

# ------------------------------------------------------------------- what the shell completes


def models_on_disk(incomplete: str) -> list[str]:
    """Ids of models on disk that begin with the text, for a shell that completes them."""
    from ...placement.errors import ExoNodeError
    from .client import call, connect

    try:
        entries = call(connect(None, None), "/v1/models", timeout_s=2).get("data", [])
    except ExoNodeError:  # such as no node: a shell that completes shows no errors
        return []
    return sorted(id for entry in entries if (id := str(entry.get("id"))).startswith(incomplete))


# --------------------------------------------------------------------------------- the flags


def option(metavar: str, help: str, *names: str, **details: Any) -> Any:
    """An option that takes a value, which the help calls `metavar`."""
    return typer.Option(*names, metavar=metavar, help=help, **details)


def switch(help: str, *names: str) -> Any:
    """An option that is on or off."""
    return typer.Option(*names, help=help)


def argument(metavar: str, help: str, **details: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, **details)


DataDir = Annotated[str | None, option("DIR", "The node's data folder. [EXO_DATA_DIR]")]
LocalPort = Annotated[
    str | None,
    option(
        "PORT", "The node's HTTP port; default: that of the node on the data folder. [EXO_PORT]"
    ),
]
AsJson = Annotated[bool, switch("Print JSON.", "--json")]
Dtype = Annotated[
    str | None, option("DTYPE", "auto, float32, bfloat16 or float16; default: auto. [EXO_DTYPE]")
]
ModelsDir = Annotated[
    list[str] | None,
    option(
        "DIR",
        "A folder of models, NAME or PUBLISHER/NAME, besides the Hugging Face cache; "
        "repeatable. [EXO_MODELS_DIR]",
    ),
]
Yes = Annotated[bool, switch("Do not ask.", "--yes", "-y")]
Model = Annotated[str, argument("MODEL", "A model's id.", autocompletion=models_on_disk)]
MinNodes = Annotated[int | None, option("N", "Over so many nodes at least.", min=1)]
MaxNodes = Annotated[int | None, option("N", "Over so many nodes at most.", min=1)]
Context = Annotated[int | None, option("TOKENS", "Room for a context of so many.", min=1)]
KvBits = Annotated[
    int | None, option("BITS", "Attention caches of 8 or 4 bits a number; 0: not quantised.")
]
Drafter = Annotated[
    str | None,
    option("MODEL", "This block drafter, by id or folder, in place of the card's; none: none."),
]
Nodes = Annotated[str | None, option("A,B", "Just these nodes, in whatever order.")]
Layers = Annotated[
    str | None, option("A:8,B:8", "This split: layers of each, the generator first.")
]
Exclude = Annotated[str | None, option("A,B", "Not these nodes.")]


def group(help: str) -> typer.Typer:
    """A command that has commands of its own."""
    return typer.Typer(help=help, add_completion=False, no_args_is_help=True, rich_markup_mode=None)
