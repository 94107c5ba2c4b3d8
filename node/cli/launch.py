"""`exo-node launch`: a coding tool that works with a model of the running node."""

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand

from ..machine.private_files import replace_private
from ..machine.setting_sources import environment
from .client import CallFailed, locate
from .coding_tools import KEY, TOOLS, CodingTool, Invocation, ServedModel, shell_lines
from .flags import DataDir, LocalPort, argument, client_settings, models_on_disk, option
from .model_choice import choose, load
from .output import note
from .times import TIMES

_ARGUMENTS: Final = "exo-node.tool-arguments"
_OWN_FILE: Final = re.compile(r"[a-z]+-[0-9a-f]{12}\.json")
"""The names that `coding_tools` gives to files."""
_LOOPBACK: Final = "127.0.0.1,localhost"
_PROXY: Final = re.compile(r"(http|https|all)_proxy", re.IGNORECASE)
_IGNORED_BY_PYTHON: Final = (signal.SIGPIPE, signal.SIGXFSZ)
"""A child that is started by exec would ignore them too."""


def _tool_names(incomplete: str) -> list[str]:
    return [name for name in TOOLS if name.startswith(incomplete)]


_Tool = Annotated[str, argument("TOOL", f"One of {', '.join(TOOLS)}.", autocompletion=_tool_names)]
_Model = Annotated[
    str | None,
    argument(
        "MODEL",
        "A model's id; default: the loaded one.",
        autocompletion=models_on_disk,
        show_default=False,
    ),
]
_Print = Annotated[
    bool, typer.Option("--print", help="Print what would be run, for a shell; nothing is loaded.")
]
_Context = Annotated[
    int | None,
    option("TOKENS", "Room for a context of so many; a model with less is reloaded.", min=1),
]


class _WithArguments(TyperCommand):
    """A command that leaves the words after `--` to the program that it starts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_ARGUMENTS] = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])


launch: Final = typer.Typer(add_completion=False, rich_markup_mode=None)


@launch.command("launch", cls=_WithArguments)
def launch_tool(
    ctx: typer.Context,
    tool: _Tool,
    model: _Model = None,
    printed: _Print = False,
    context: _Context = None,
    port: LocalPort = None,
    data_dir: DataDir = None,
) -> None:
    """Start a coding tool that works with a model of the node.

    Words after `--` are the tool's own: `exo-node launch claude -- --continue`. The model is
    loaded first, and the settings are shown; no file of the tool is changed.
    """
    if (chosen := TOOLS.get(tool)) is None:
        raise typer.BadParameter(f"{tool!r} is none of {', '.join(TOOLS)}", param_hint="TOOL")
    settings = client_settings(port, data_dir)
    executable = "" if printed else _executable(chosen)
    endpoint = locate(settings)
    choice = choose(endpoint, chosen, model, context)
    if not printed:
        choice = load(endpoint, choice)
    key = settings.api_key
    served = ServedModel(f"http://{endpoint}", choice.model, choice.context, key)
    printable = replace(served, key=None if key is None else KEY)
    folder, arguments = settings.data_dir / "launch", ctx.meta[_ARGUMENTS]
    text = shell_lines(chosen.command, chosen.invocation(printable, folder), arguments)
    if printed:
        print(text)
        return
    context_text = f"{choice.context:,} tokens of context"
    note(f"{chosen.title} uses {choice.model}, with {context_text}:", *text.splitlines())
    _start(executable, chosen.command, chosen.invocation(served, folder), arguments)


def _executable(tool: CodingTool) -> str:
    """The path of the tool. Raises CallFailed with the way to install it."""
    path = shutil.which(tool.command, path=environment().get("PATH"))
    if path is None:
        raise CallFailed(
            f"{tool.title} is not installed: there is no {tool.command} in PATH",
            code="tool_missing",
            remedy=f"to install it: {tool.install}",
        )
    return path


def _start(
    executable: str, command: str, invocation: Invocation, arguments: tuple[str, ...]
) -> NoReturn:
    """Replaces this process with the tool, which so gets its terminal, signals and exit status.

    Raises CallFailed where a file cannot be written or the tool cannot be started.
    """
    for path, text in invocation.files.items():
        _remove_old(path.parent)
        _write(path, text)
    for each in _IGNORED_BY_PYTHON:
        _ = signal.signal(each, signal.SIG_DFL)
    sys.stdout.flush()
    words = [command, *invocation.arguments, *arguments]
    try:
        os.execve(executable, words, _beside_proxies({**environment(), **invocation.environment}))
    except OSError as error:
        raise CallFailed(f"{executable} cannot be started: {error.strerror}") from error


def _remove_old(folder: Path) -> None:
    """Deletes the files of launches long ago: each launch writes its own again."""
    for path in filter(lambda each: _OWN_FILE.fullmatch(each.name), folder.glob("*.json")):
        with contextlib.suppress(OSError):  # another launch may have deleted or written it
            if time.time() - path.stat().st_mtime > TIMES.tool_file_s:
                path.unlink()


def _beside_proxies(variables: Mapping[str, str]) -> Mapping[str, str]:
    """The variables, by which no proxy is asked for the node, which is on this machine."""
    direct = {name: variables.get(name, "") for name in ("NO_PROXY", "no_proxy")}
    hosts = {name: ",".join(filter(None, (own, _LOOPBACK))) for name, own in direct.items()}
    return {**variables, **hosts} if any(map(_PROXY.fullmatch, variables)) else variables


def _write(path: Path, text: str) -> None:
    try:
        replace_private(path, text.encode())
    except OSError as error:
        raise CallFailed(
            f"{path} cannot be written: {error.strerror}",
            remedy="--print shows what to set by hand",
        ) from error
