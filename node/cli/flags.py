"""Flags and arguments of the commands as types, and what the common ones mean."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..machine.settings import ClientSettings

# ---------------------------------------------------------------------------- of several commands

DataDir = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="The node's data folder. [EXO_DATA_DIR]"),
]
LocalPort = Annotated[
    str | None,
    typer.Option(
        metavar="PORT",
        help="The node's HTTP port; default: that of the node on the data folder. [EXO_PORT]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="auto, float32, bfloat16 or float16. [EXO_DTYPE]"),
]
ModelsDir = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DIR",
        help="A folder of models, NAME or PUBLISHER/NAME, besides the Hugging Face cache; "
        "repeatable. [EXO_MODELS_DIR]",
    ),
]


def client_settings(port: str | None, data_dir: str | None) -> "ClientSettings":
    """How to find the node that a LocalPort and a DataDir mean. Raises InvalidSettings."""
    from ..machine.settings import environment, load_client_settings

    return load_client_settings({"port": port, "data_dir": data_dir}, environment())


# ------------------------------------------------------------------- what the shell completes


def known_models(incomplete: str) -> list[str]:
    """Ids of models on disk that begin so."""
    return _known("/v1/models", "id", incomplete)


def known_placements(incomplete: str) -> list[str]:
    """Models that are loaded, which names their placements."""
    return _known("/v1/placements", "model", incomplete)


def known_nodes(incomplete: str) -> list[str]:
    """Names in a list with commas of which the last is being typed."""
    before, comma, last = incomplete.rpartition(",")
    found = _known("/v1/cluster", "name", last, within="nodes")
    return [f"{before}{comma}{name}" for name in found]


def _known(path: str, field: str, incomplete: str, within: str = "data") -> list[str]:
    """A shell that completes shows no errors: without a node there is nothing to offer."""
    from ...placement.errors import ExoNodeError
    from .client import call, locate

    try:
        entries = call(locate(client_settings(None, None)), path, timeout_s=2).get(within, [])
    except ExoNodeError:
        return []
    return sorted(
        name for name in (str(e.get(field)) for e in entries) if name.startswith(incomplete)
    )


# ---------------------------------------------------------------------------------------- of chat

Prompt = Annotated[
    str | None,
    typer.Argument(
        metavar="[PROMPT]",
        help="What to ask; - or a pipe: stdin says. On a terminal nothing begins a conversation.",
        show_default=False,
    ),
]
ChatModel = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        autocompletion=known_models,
        help="A model's id; default: the loaded one, else the largest that fits.",
    ),
]
MaxTokens = Annotated[int | None, typer.Option(min=1, metavar="N", help="Stop after that many.")]
Temperature = Annotated[
    float | None, typer.Option(min=0, metavar="T", help="0 is greedy; default: the model's.")
]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(min=0, metavar="K", help="Drafts a round; 0 is off; default: the model's."),
]

# -------------------------------------------------------------------------------------- of events

Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Go on with what happens, until Ctrl-C.")
]
Limit = Annotated[
    int, typer.Option(min=0, max=1000, metavar="N", help="The latest N of those before.")
]
Own = Annotated[
    bool, typer.Option("--node", help="What this node saw itself, not what the head did.")
]

# ----------------------------------------------------------------------------------------- of top

Once = Annotated[
    bool, typer.Option("--once", help="Print one snapshot, as where stdout is no terminal.")
]

# -------------------------------------------------------------------------------------- of verify

VerifiedModel = Annotated[
    str, typer.Argument(metavar="[MODEL]", help="A model's id, or a checkpoint's folder.")
]
Depth = Annotated[
    int | None,
    typer.Option("--k", min=1, metavar="K", help="Most drafts a round; default: the card's."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer prompts, tokens and samples.")]
Report = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", help="Write the report to send to us; - prints it instead."
    ),
]

# ---------------------------------------------------------------------------------------- of plan

PlannedModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model's id.", autocompletion=known_models)
]
MinNodes = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Over so many nodes at least.")
]
MaxNodes = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Over so many nodes at most.")
]
Context = Annotated[
    int | None, typer.Option(min=1, metavar="TOKENS", help="Room for a context of so many.")
]
Nodes = Annotated[
    str | None,
    typer.Option(
        metavar="A,B", autocompletion=known_nodes, help="Just these nodes, in whatever order."
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(metavar="A:8,B:8", help="This split: layers of each, the generator first."),
]
Exclude = Annotated[
    str | None, typer.Option(metavar="A,B", autocompletion=known_nodes, help="Not these nodes.")
]
