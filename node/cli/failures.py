"""The end of a command that fails: a sentence on stderr, or with `--json` one JSON object there."""

import errno
import json
from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

import typer

from ...placement.errors import ExoNodeError, InvalidSettings

EXIT_FAILED: Final = 1
_EXIT_USAGE: Final = 2
_OF_THE_MACHINE: Final = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room on that disk, or have its quota raised",
    errno.EROFS: "make that disk writable",
    errno.EIO: "that disk has faults: see the system's log",
    errno.EACCES: "mend its permissions",
    errno.EPERM: "mend its permissions",
}
"""The faults of a disk and its permissions, with their remedies."""


@runtime_checkable
class _WrongUse(Protocol):
    """An error of the parser; typer exports no common base of them."""

    exit_code: int

    def format_message(self) -> str: ...


def with_remedy(what: str, remedy: str | None) -> str:
    """One sentence of both; `what` may end with a full stop."""
    if not remedy:
        return what
    return f"{what if what.endswith('...') else what.removesuffix('.')}; {remedy}"


class CommandFailed(ExoNodeError):
    """Why a command failed, and its exit status."""

    def __init__(
        self,
        what: str,
        *,
        exit_code: int = EXIT_FAILED,
        code: str = "call_failed",
        remedy: str | None = None,
    ) -> None:
        """`what` becomes one line without control characters: another process may have sent it."""
        from ..machine.log import escape_controls

        self.what = escape_controls(" ".join(what.split()))
        super().__init__(with_remedy(self.what, remedy))
        self.exit_code = exit_code
        self.code = code
        self.remedy = remedy

    def as_json(self) -> str:
        remedy = {} if self.remedy is None else {"remedy": self.remedy}
        return json.dumps({"error": {"message": self.what, "code": self.code, **remedy}})


def failure_of(error: Exception, *, as_json: bool) -> CommandFailed | None:
    """The failure that an error of the tree, a full disk or a missing permission is, or None.

    With `as_json` an error of the parser and a refused question are failures, too. An error without
    a code of its own has the code `failed`.
    """
    if as_json and isinstance(error, _WrongUse):
        text = error.format_message()
        return CommandFailed(text, code="wrong_use", exit_code=error.exit_code)
    match error:
        case CommandFailed():
            return error
        case InvalidSettings():
            return CommandFailed(error.message, code=error.code, exit_code=_EXIT_USAGE)
        case ExoNodeError():
            code = "failed" if type(error) is ExoNodeError else error.code
            return CommandFailed(error.message, code=code)
        case OSError() if remedy := _OF_THE_MACHINE.get(error.errno or 0):
            where = "" if error.filename is None else f" ({error.filename})"
            return CommandFailed(f"{error.strerror}{where}", code="failed", remedy=remedy)
        case typer.Abort() if as_json:
            return CommandFailed("the question was not answered with yes", code="aborted")
        case _:
            return None


def wants_json(words: Sequence[str]) -> bool:
    """Whether a command with these words prints JSON."""
    return "--json" in (words[: words.index("--")] if "--" in words else words)
