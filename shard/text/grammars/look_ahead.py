"""Rewrites a pattern that looks ahead at its beginning as several patterns that do not.

A text matches `^(?!X)(?=Y)Z` if `^Z` and `^Y` occur in it and `^X` does not. Grammars have no
complement within JSON, so X must be of a form whose complement is a plain expression: a fixed
number of characters, at the beginning, anywhere, or as the whole text; or only characters of one
class. Decimal of pydantic and the e-mail address of zod are.
"""

import re
from collections.abc import Iterator
from typing import Final

from ..tools.schemas import SchemaFault

_AROUND: Final = re.compile(r"\(\?<?[=!]")
_ATOM: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[\](){}?*+|^$]", re.DOTALL)
_NOT_PLAIN: Final = re.compile(r"\\[bBAZzGkpPuUxNc0-9]")
"""Escapes that are no single character, or of which a class may not have the same."""
_REST: Final = "(?s:.*)"


def plain_patterns(pattern: str) -> list[str]:
    """The patterns that a text must match instead. Raises SchemaFault."""
    if not _AROUND.search(pattern):
        return [pattern]
    rest, plain = pattern.removeprefix("^"), list[str]()
    while rest.startswith(("(?!", "(?=")):
        inner, kind = _group(rest), rest[2]
        rest = rest[len(inner) + 4 :]
        if kind == "=":
            plain.append(_anchored(inner))
        else:
            plain += [_complement(each, pattern) for each in _alternatives_within(inner)]
    is_split = not pattern.startswith("^") or len(list(regex_alternatives(rest))) > 1
    matches = [match for each in (rest, *plain) if (match := _AROUND.search(each))]
    if is_split or matches:
        mark = matches[0][0] if matches else "(?!"
        raise SchemaFault(
            f"the pattern looks around with '{mark}', which can be enforced after '^' only"
        )
    return [f"^{rest}", *plain] if rest else plain


def regex_alternatives(pattern: str) -> Iterator[str]:
    """Splits `pattern` at each `|` outside of groups and character classes."""
    begin = 0
    for at, char, depth in _outside_classes(pattern):
        if char == "|" and depth == 0:
            yield pattern[begin:at]
            begin = at + 1
    yield pattern[begin:]


def _outside_classes(pattern: str) -> Iterator[tuple[int, str, int]]:
    """The characters that are neither escaped nor in a class, and the groups around each."""
    depth, in_class, escaped = 0, False, False
    for at, char in enumerate(pattern):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        else:
            depth += {"(": 1, ")": -1}.get(char, 0)
            yield at, char, depth


def _group(pattern: str) -> str:
    """The inside of the look-ahead that `pattern` begins with."""
    for at, char, depth in _outside_classes(pattern):
        if char == ")" and depth == 0:
            return pattern[3:at]
    raise SchemaFault(f"the pattern '{pattern[:80]}' has a group without an end")


def _alternatives_within(inner: str) -> Iterator[str]:
    """The alternatives of a look-ahead, also where one group holds them all."""
    for part in regex_alternatives(inner):
        group = re.fullmatch(r"\^?\((?:\?:)?(.*)\)(\$?)", part, re.DOTALL)
        if group and len(list(regex_alternatives(part))) == 1 and not _AROUND.search(group[1]):
            yield from (f"{each}{group[2]}" for each in regex_alternatives(group[1]))
        else:
            yield part


def _anchored(inner: str) -> str:
    inner = inner.removeprefix("^")
    is_whole = inner.endswith("$") and not inner.endswith("\\$")
    return f"^(?:{inner[:-1]})$" if is_whole else f"^(?:{inner})"


def _complement(inner: str, pattern: str) -> str:
    """The pattern of the texts that `^inner` does not match."""
    body = inner.removeprefix("^")
    anywhere, body = body.startswith(".*"), body.removeprefix(".*")
    whole, body = body.endswith("$") and not body.endswith("\\$"), body.removesuffix("$")
    repeated = body[-1:] if body[-1:] in ("*", "+") and body[-2:-1] != "\\" else ""
    atoms = _ATOM.findall(body.removesuffix(repeated))
    if "".join(atoms) + repeated == body and atoms and not _NOT_PLAIN.search(body):
        if repeated and len(atoms) == 1 and whole and not anywhere:
            return f"{'^$|' if repeated == '+' else ''}{_others(atoms[0])}"
        if not repeated and not anywhere:
            return f"^{_not_begun(atoms, whole=whole)}$"
        if not repeated and not whole and len({*atoms}) == 1:
            few = f"{atoms[0]}{{0,{len(atoms) - 1}}}"
            return f"^(?:{few}{_others(atoms[0])})*{few}$"
    raise SchemaFault(f"the pattern '{pattern[:80]}' excludes '{inner[:40]}', which is not simple")


def _not_begun(atoms: list[str], *, whole: bool) -> str:
    """The expression of texts that do not begin with `atoms`, or are others than them."""
    first, *others = atoms
    following = "(?s:.+)" if whole else ""
    following = _not_begun(others, whole=whole) if others else following
    same = f"|{first}{following}" if following else ""
    return f"(?:{_others(first)}{_REST}{same})?"


def _others(atom: str) -> str:
    """The class of the characters that are not `atom`'s."""
    if atom.startswith("[^"):
        return f"[{atom[2:]}"
    if atom.startswith("["):
        return f"[^{atom[1:]}"
    if atom == ".":
        return r"[^\s\S]"
    return f"[^{atom}]"
