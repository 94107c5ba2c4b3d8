"""The `exo-node` command: its subcommands, each imported when it is used, and its error edge.

Data goes to stdout, notes to stderr, no colours anywhere. With `--json` an error is a JSON object,
the last line on stderr. Exit codes: 0 done, 1 failed, 2 wrong use or settings, 69 no node runs, 75
try again later, 130 interrupted.
"""

import io
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache, partial
from types import ModuleType
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ..machine.own_command import own_program, typable
from ..machine.setting_sources import forget_variables_of_libraries
from .failures import failure_of, wants_json

_AS_JSON: Final = "exo-node.as-json"

GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "Every day": {
        "start": "Run a node here, in the foreground.",
        "chat": "Ask the node, or have a conversation on the terminal.",
        "dashboard": "Print a link to the dashboard, valid once.",
        "launch": "Start a coding tool that works with a model of the node.",
        "status": "Show the node, its cluster and where models run.",
        "stop": "End the node on the data folder, and wait for its end.",
    },
    "Models": {
        "models": "List the models on disk, and get others.",
        "plan": "Show where a model would be placed, and why.",
    },
    "Cluster": {
        "nodes": "List the nodes of the cluster, and who asks to join.",
        "approve": "Let a new node in by the six digits that it shows.",
        "deny": "Turn a node away that asks to join.",
        "join": "Put this node into the cluster that has the key.",
        "key": "Print the cluster's key, by which other nodes join.",
        "leave": "Take this node out of its cluster.",
        "token": "Make and revoke keys for clients.",
        "service": "Run the node whenever you are logged in.",
    },
    "Look and measure": {
        "doctor": "Look for what is wrong here.",
        "report": "Write a report on a problem, or a result to publish.",
        "verify": "Check that drafts change no answer of a model.",
        "bench": "Measure models on this machine, and servers under load.",
    },
}
"""The commands in the order in which people need them, with the first sentence of each help.

The help of `exo-node` shows it, so that it need not import the commands.
"""
COMMANDS: Final[Mapping[str, str]] = {
    name: sentence for group in GROUPS.values() for name, sentence in group.items()
}
FIRST: Final = "Begin with `exo-node start`, then, in another terminal, `exo-node chat`."
SYNONYMS: Final[Mapping[str, Sequence[str]]] = {
    "serve": ("start",),
    "run": ("chat", "--model"),
    "ls": ("models",),
    "list": ("models",),
    "pull": ("models", "pull"),
    "get": ("models", "pull"),
    "download": ("models", "pull"),
    "search": ("models", "search"),
    "import": ("models", "import"),
    "rm": ("models", "rm"),
    "remove": ("models", "rm"),
    "delete": ("models", "rm"),
    "show": ("models", "show"),
    "info": ("models", "show"),
    "load": ("models", "load"),
    "unload": ("models", "unload"),
    "ps": ("status",),
    "top": ("status",),
    "version": ("--version",),
    "help": ("--help",),
}
"""The words of other programs that run models, and the words here."""


@cache
def load_command(name: str) -> Any:
    """Builds a command with its options."""
    if name != "launch":  # the coding tool that it starts gets all variables
        forget_variables_of_libraries()
    target = getattr(_module(name), name)
    if not isinstance(target, typer.Typer):
        function, target = target, typer.Typer(add_completion=False, rich_markup_mode=None)
        _ = target.command(name)(function)
    return _for_people(get_command(target))


def _for_people(command: Any) -> Any:
    """Usage lines such as `chat [PROMPT]`, and commands in the help as they can be typed here."""
    command.help, command.epilog = typable(command.help or ""), typable(command.epilog or "")
    for param in command.params:
        param.help = typable(param.help or "")
        if param.param_type_name == "argument":
            param.get_usage_pieces = partial(_usage, param)
    for each in getattr(command, "commands", {}).values():
        _ = _for_people(each)
    return command


def _usage(argument: Any, _: object) -> list[str]:
    """The argument in a usage line; the parser's own has braces around what is required."""
    if argument.hidden:
        return []
    name = argument.metavar or argument.name.upper()
    return [name if argument.required or name.startswith("[") else f"[{name}]"]


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
        case "token":
            from . import token as module
        case "plan":
            from . import load as module
        case "service":
            from . import service as module
        case "doctor":
            from . import doctor as module
        case "report":
            from . import report as module
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
        if (word := args[0]) not in COMMANDS and not word.startswith("-"):
            near = get_close_matches(word, [*COMMANDS, *SYNONYMS])
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            ctx.fail(f"No such command {word!r}.{hint}")
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else load_command(str(name)), rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(9), typable(each)) for name, each in commands.items()]
                )

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and (words := SYNONYMS.get(args[0])):
            args = [*words, *args[1:]]
        if not any(word.endswith("-completion") for word in args):  # these go by the name
            ctx.info_name = own_program()
        ctx.meta[_AS_JSON] = wants_json(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            as_json = ctx.meta[_AS_JSON]
            if (failure := failure_of(error, as_json=as_json)) is None:
                raise  # the parser prints its own errors in words
            line = failure.as_json() if as_json else f"exo-node: {typable(failure.message)}"
            print(line, file=sys.stderr, flush=True)
            raise typer.Exit(failure.exit_code) from error


app = typer.Typer(
    cls=_Commands,
    help="Run large models on the Macs and Linux machines that you own.",
    epilog=typable(FIRST),
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
