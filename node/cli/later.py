"""Commands whose options are read when one of them runs: for 34 that is half of `--help`."""

import inspect
from collections.abc import Iterator, MutableMapping
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command_from_info, get_command_name, get_group_from_info
from typer.models import CommandInfo, TyperInfo


class Later(MutableMapping[str, Any]):
    """Those of `registered` by name, each built when it is asked for."""

    def __init__(self, registered: typer.Typer) -> None:
        self._known: dict[str, CommandInfo | TyperInfo] = {
            _name_of(info): info
            for info in (*registered.registered_commands, *registered.registered_groups)
        }
        self._built: dict[str, Any] = {}

    def shown(self, name: str) -> TyperCommand:
        """What a list of commands tells of it: its name and help."""
        info = self._known[name]
        if isinstance(info, TyperInfo):
            assert info.typer_instance is not None
            words = info.typer_instance.info.help
        else:
            words = info.help or inspect.getdoc(info.callback)
        return TyperCommand(name, help=str(words or ""), hidden=info.hidden is True)

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = _build(self._known[name])
        return self._built[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known  # the inherited one would build it

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __setitem__(self, name: str, command: Any) -> None:
        raise TypeError("commands are registered with their Typer")

    def __delitem__(self, name: str) -> None:
        raise TypeError("commands are registered with their Typer")


def _name_of(info: CommandInfo | TyperInfo) -> str:
    if isinstance(info, CommandInfo) and not info.name:
        assert info.callback is not None
        return get_command_name(info.callback.__name__)
    return str(info.name)


def _build(info: CommandInfo | TyperInfo) -> Any:
    if isinstance(info, CommandInfo):
        return get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode=None)
    return get_group_from_info(
        info, pretty_exceptions_short=True, rich_markup_mode=None, suggest_commands=True
    )
