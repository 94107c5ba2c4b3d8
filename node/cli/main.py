"""The `exo-node` command: its subcommands, each imported when it is used, and its error edge.

Data goes to stdout, notes to stderr, no colours anywhere. With `--json` an error is a JSON object,
the last line on stderr. Exit codes: 0 done, 1 failed, 2 wrong use or settings, 69 no node runs, 75
try again later, 130 interrupted.
"""

import io
import sys
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ...placement.errors import ExoNodeError
from ..machine.setting_sources import forget_variables_of_libraries
from .failures import failure_of, unfinished, wants_json

_AS_JSON: Final = "exo-node.as-json"

COMMANDS: Final[Mapping[str, str]] = {
    "start": "Run a node here, in the foreground.",
    "chat": "Ask the node one question, or, without PROMPT on a terminal, have a conversation.",
    "status": "Show the node, its cluster and where models run.",
    "models": "List the models on disk, and get others.",
    "launch": "Start a coding tool that works with a model of the node.",
    "top": "Watch nodes, placements, requests and tokens a second, until Ctrl-C.",
    "dashboard": "Print a link to the dashboard that lets this browser change things",
    "stop": "End the node on the data folder, and wait for its end.",
    "nodes": "List the cluster's nodes and who asks to join; on a new node, the digits",
    "approve": "Let a new node into this cluster by the six digits that its own screen shows.",
    "deny": "Turn a node away that asks to join.",
    "join": "Put this node into the cluster that has the key.",
    "key": "Print the cluster's key, for `exo-node join` elsewhere.",
    "leave": "Take this node out of its cluster: it forgets the key and founds a cluster",
    "rekey": "Give the cluster a new key, so that a lost machine is out of it.",
    "token": "Make and revoke keys for clients.",
    "cache": "Show and clear the prompts that models keep on disk.",
    "plan": "Show where a model would be placed, what comes next and why; nothing is loaded.",
    "replicas": "Have N copies of a model answer at the same time, each on nodes of its own.",
    "events": "Show what happened in the cluster, one line each.",
    "service": "Run the node whenever you are logged in.",
    "doctor": "Look for what is wrong here: versions, backend, disk, memory, ports, and the other",
    "report": "Write what helps to understand a problem into a file, to attach to an issue.",
    "verify": "Check that drafts change no answer of a model on this machine.",
    "bench": "Measure models on this machine, and the cluster.",
}
"""The commands in the order in which people need them, with the beginning of the help of each.

The help of `exo-node` shows it, so that it need not import the commands.
"""


@cache
def load_command(name: str) -> Any:
    """Builds a command with its options."""
    if name != "launch":  # the coding tool that it starts gets all variables
        forget_variables_of_libraries()
    target = getattr(_module(name), name)
    if not isinstance(target, typer.Typer):
        function, target = target, typer.Typer(add_completion=False, rich_markup_mode=None)
        _ = target.command(name)(function)
    return get_command(target)


def _module(name: str) -> ModuleType:
    match name:
        case "start" | "stop":
            from . import start as module
        case "chat":
            from . import chat as module
        case "launch":
            from . import launch as module
        case "status":
            from . import status as module
        case "models":  # the last of the modules that add commands to this group
            from . import convert_models as module
        case "top":
            from . import top as module
        case "token":
            from . import token as module
        case "cache":
            from . import cache as module
        case "plan":
            from . import plan as module
        case "replicas":
            from . import load as module
        case "events":
            from . import events as module
        case "service":
            from . import service as module
        case "doctor" | "report":
            from . import doctor as module
        case "verify":
            from . import verify as module
        case "bench":
            from . import bench as module
        case _:
            from . import join as module
    return module


class _Commands(TyperGroup):
    """Lists commands without importing them; turns their errors into a line and an exit code."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name, help=sentence) for name, sentence in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else load_command(str(name)), rest

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_AS_JSON] = wants_json(self._first_of(args), args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ExoNodeError as error:
            failure = failure_of(error)
            as_json = ctx.meta[_AS_JSON]
            _print_error(failure.as_json() if as_json else f"exo-node: {failure.sentence()}")
            raise typer.Exit(failure.exit_code) from error
        except Exception as error:
            if not ctx.meta[_AS_JSON] or (failure := unfinished(error)) is None:
                raise  # the parser prints its own errors in words
            _print_error(failure.as_json())
            raise typer.Exit(failure.exit_code) from error

    def _first_of(self, words: list[str]) -> Any:
        """The command that `words` name; this group where they name none."""
        return next((load_command(word) for word in words if word in COMMANDS), self)


app = typer.Typer(
    cls=_Commands,
    help="Run large models on the Macs and Linux machines that you own.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The entry point of `exo-node`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that it cannot encode becomes `?`
            stream.reconfigure(errors="replace")
    app(prog_name="exo-node")


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(f"exo-node {version('exo-node')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Run large models on the Macs and Linux machines that you own."""


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
