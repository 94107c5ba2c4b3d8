"""The words that start this program in a shell, where `exo-node` alone does not."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

_NAME: Final = "exo-node"


@cache
def own_command() -> str:
    """The command of this process for a shell in any folder, with the data folder it was given."""
    return f"{data_dir_for(sys.argv[1:])}{own_program()}"


@cache
def own_program() -> str:
    """The program of this process for a shell in any folder: `exo-node`, or its path."""
    return command_for(sys.argv[0], shutil.which(_NAME), Path.home())


def data_dir_for(words: Sequence[str]) -> str:
    """The variable that leads other commands to the data folder that `words` name, or "".

    A variable fits each command, and is in effect wherever in the line its options may stand.
    """
    words = words[: words.index("--")] if "--" in words else words
    for word, following in zip(words, [*words[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        if flag == "--data-dir" and (folder := value if equals else following):
            return f"EXO_DATA_DIR={shlex.quote(str(Path(folder).expanduser().absolute()))} "
    return ""


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
