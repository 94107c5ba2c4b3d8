"""The words that start this program in a shell, where `exo-node` alone does not."""

import shlex
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Final

_NAME: Final = "exo-node"


@cache
def own_command() -> str:
    """The command of this process for a shell in any folder: `exo-node`, or its path."""
    return command_for(sys.argv[0], shutil.which(_NAME), Path.home())


def command_for(program: str, on_path: str | None, home: Path) -> str:
    """The command of `program`; `on_path`: what a shell finds as `exo-node`.

    A program of another name, such as a test's, is called as people call exo-node.
    """
    path = Path(program)
    if path.name != _NAME or not path.is_file():
        return _NAME
    if on_path is not None and path.samefile(on_path):
        return _NAME
    path = path.absolute()  # not resolved: a link to it stays where an upgrade puts another
    if path.is_relative_to(home):
        return f"~/{shlex.quote(str(path.relative_to(home)))}"
    return shlex.quote(str(path))


def typable(text: str) -> str:
    """`text` with commands in it as a person can type them here."""
    return text.replace(f"`{_NAME} ", f"`{own_command()} ")
