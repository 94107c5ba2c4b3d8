"""Reads Python source without running it, one text at a time.

Python 3.11 counts the depth of the trees that all threads build with one counter. Where the garbage
collector lets another thread parse meanwhile, `ast.parse` raises SystemError for sound source.
"""

import ast
import threading
from typing import Final

_PARSING: Final = threading.Lock()


def statements(source: str) -> list[ast.stmt]:
    """The syntax trees of a module's statements. Raises SyntaxError, and what `ast.parse` raises
    for null bytes or deep nesting: ValueError, MemoryError, RecursionError."""
    with _PARSING:
        return ast.parse(source).body


def literal(source: str) -> object:
    """The value that a literal spells. Raises what `statements` raises, and ValueError if it is
    not a literal."""
    with _PARSING:
        tree = ast.parse(source, mode="eval")
    try:
        return ast.literal_eval(tree)
    except TypeError as error:  # a list as the key of a dictionary
        raise ValueError(str(error)) from error
