"""`exo-node launch`: a coding tool that works with a model of the running node, which is chosen,
checked for its context and loaded."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand

from ...placement.errors import InvalidSettings
from ..machine.private_files import replace_private
from ..machine.setting_sources import environment
from .client import ApiEndpoint, call, client_settings, locate
from .coding_tools import KEY, TOOLS, CodingTool, Invocation, ServedModel, shell_lines
from .failures import CommandFailed
from .flags import DataDir, LocalPort, argument, models_on_disk, option, switch
from .load import load as load_model
from .load import preview_path
from .output import note
from .times import TIMES

_NAMED: Final = 8

Entry = Mapping[str, Any]
"""An entry of `GET /v1/models`."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model as a tool names it, and its context: as it is loaded, or as a load would place it.

    `base` is the model of a profile, else the model itself. `request` is the body that loads it, or
    None if it is loaded.
    """

    model: str
    base: str
    context: int
    request: Mapping[str, Any] | None = None


def choose(
    endpoint: ApiEndpoint, tool: CodingTool, model: str | None, context: int | None
) -> ModelChoice:
    """The named model, or else the loaded one, with room for what the tool needs. Loads nothing.

    Raises InvalidSettings with what is missing and models that would do, and CommandFailed.
    """
    # As the tool will call: with the key, and without the rights of the node's own user.
    as_the_tool = replace(endpoint, token=None)
    listed = call(as_the_tool, "/v1/models", timeout_s=TIMES.model_list_s).get("data", [])
    entries = [each for each in listed if not _can(each, "embeddings")]
    if model is not None and model in {each["id"] for each in listed if _can(each, "embeddings")}:
        raise InvalidSettings(f"{model} embeds and does not answer; name another", param="MODEL")
    entry = _entry(entries, tool, model)
    choice = _planned(endpoint, entry, context)
    if choice.context < tool.least_context:
        raise _too_small(tool, choice, entry, entries)
    if tool.calls and "capabilities" in entry and not _can(entry, "tools"):
        note(f"{choice.model} has no format for calling tools, by which {tool.title} works")
    return choice


def load(endpoint: ApiEndpoint, choice: ModelChoice) -> ModelChoice:
    """Loads the model unless it is loaded, and shows the progress. Raises CommandFailed."""
    if choice.request is None:
        return choice
    note(f"loading {choice.base}, with {_tokens(choice.context)} of context")
    placement = load_model(endpoint, choice.request)
    return replace(choice, context=placement["context_length"], request=None)


def _entry(entries: Sequence[Entry], tool: CodingTool, model: str | None) -> Entry:
    """The entry of the model; of one that is on no disk its name alone."""
    if model is not None:
        return next((each for each in entries if each["id"] == model), {"id": model})
    loaded = [each for each in entries if each.get("loaded") and not each.get("profile_of")]
    if len(loaded) > 1:
        loaded = [each for each in loaded if _context(each) >= tool.least_context] or loaded
    if len(loaded) == 1:
        return loaded[0]
    what = "several models are loaded" if loaded else "no model is loaded"
    raise InvalidSettings(f"{what}; {_remedy(tool, loaded or entries)}", param="MODEL")


def _planned(endpoint: ApiEndpoint, entry: Entry, context: int | None) -> ModelChoice:
    name = str(entry["id"])
    if fault := entry.get("error"):
        raise CommandFailed(f"{name} cannot be used: {fault}")
    base = str(entry.get("profile_of") or name)
    if entry.get("loaded") and _context(entry) >= (context or 0):
        return ModelChoice(name, base, _context(entry))
    options = {} if context is None else {"context": context}
    preview = call(endpoint, preview_path(base, options), timeout_s=TIMES.model_list_s)
    if refusal := preview.get("refusal"):
        raise CommandFailed(str(refusal))
    return ModelChoice(name, base, preview["best"]["context_length"], {"model": base, **options})


def _too_small(
    tool: CodingTool, choice: ModelChoice, entry: Entry, entries: Sequence[Entry]
) -> InvalidSettings:
    """The error for a context that has no room for the tool's first request and an answer."""
    what = f"{choice.model} has {_tokens(choice.context)} of context, and {tool.title} needs "
    what += _tokens(tool.least_context)
    if choice.request is None and _fitting_context(entry) >= tool.least_context:
        remedy = f"`--context {tool.least_context}` loads it again with so many"
    else:
        remedy = _remedy(tool, entries)
    return InvalidSettings(f"{what}; {remedy}", param="MODEL")


def _remedy(tool: CodingTool, entries: Sequence[Entry]) -> str:
    """The models that would do, the loaded ones first."""
    enough = [each for each in entries if _serves(each, tool)]
    names = [str(each["id"]) for each in sorted(enough, key=lambda each: not each.get("loaded"))]
    if not names:
        tools = " and calls tools" if tool.calls else ""
        return (
            f"no model here has the {_tokens(tool.least_context)} of context that it needs{tools}: "
            "`exo-node models recommend` names models that fit this machine"
        )
    return f"`exo-node launch {tool.command} MODEL` names one: {', '.join(names[:_NAMED])}"


def _serves(entry: Entry, tool: CodingTool) -> bool:
    """Whether a model has the context that the tool needs, and calls if it works by them."""
    calls = _can(entry, "tools") or "capabilities" not in entry
    return (
        not entry.get("error")
        and _context(entry) >= tool.least_context
        and (calls or not tool.calls)
    )


def _context(entry: Entry) -> int:
    """Tokens of context of a loaded model, or those that a load would give it now."""
    return int(entry.get("context_length") or 0) if entry.get("loaded") else _fitting_context(entry)


def _fitting_context(entry: Entry) -> int:
    """The context of a model; its own where only other nodes have it: none plans for it here."""
    fits: Entry = entry if entry.get("fits") is None else entry["fits"]
    return int(fits.get("context_length") or 0)


def _can(entry: Entry, capability: str) -> bool:
    return capability in (entry.get("capabilities") or ())


def _tokens(count: int) -> str:
    return f"{count:,} tokens"


_ARGUMENTS: Final = "exo-node.tool-arguments"
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
    bool, switch("Print what would be run, for a shell; nothing is loaded.", "--print")
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
    """The path of the tool. Raises CommandFailed with the way to install it."""
    path = shutil.which(tool.command, path=environment().get("PATH"))
    if path is None:
        raise CommandFailed(
            f"{tool.title} is not installed: there is no {tool.command} in PATH",
            code="tool_missing",
            remedy=f"to install it: {tool.install}",
        )
    return path


def _start(
    executable: str, command: str, invocation: Invocation, arguments: tuple[str, ...]
) -> NoReturn:
    """Replaces this process with the tool, which so gets its terminal, signals and exit status.

    Raises CommandFailed where a file cannot be written or the tool cannot be started.
    """
    for path, text in invocation.files.items():
        _write(path, text)
    for each in _IGNORED_BY_PYTHON:
        _ = signal.signal(each, signal.SIG_DFL)
    sys.stdout.flush()
    words = [command, *invocation.arguments, *arguments]
    try:
        os.execve(executable, words, _beside_proxies({**environment(), **invocation.environment}))
    except OSError as error:
        raise CommandFailed(f"{executable} cannot be started: {error.strerror}") from error


def _beside_proxies(variables: Mapping[str, str]) -> Mapping[str, str]:
    """The variables, by which no proxy is asked for the node, which is on this machine."""
    direct = {name: variables.get(name, "") for name in ("NO_PROXY", "no_proxy")}
    hosts = {name: ",".join(filter(None, (own, _LOOPBACK))) for name, own in direct.items()}
    return {**variables, **hosts} if any(map(_PROXY.fullmatch, variables)) else variables


def _write(path: Path, text: str) -> None:
    try:
        replace_private(path, text.encode())
    except OSError as error:
        raise CommandFailed(
            f"{path} cannot be written: {error.strerror}",
            remedy="--print shows what to set by hand",
        ) from error
