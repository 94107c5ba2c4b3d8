"""Identifiers that come from outside and become parts of paths.

Hubs, peers, requests and files choose their text. Each has a type of its own, of which only a check
makes values; nothing else from outside may be a part of a path.
"""

import os
import re
from typing import ClassVar, Final, Self

_MAX_PART_BYTES: Final = 200
"""Limit of a file's name: file systems allow 255, and a partial file has a suffix."""


class Identifier(str):
    """Text that its check has passed. Raises ValueError for any other text."""

    __slots__ = ()
    _FORM: ClassVar[re.Pattern[str]]

    def __new__(cls, text: str) -> Self:
        if not cls.matches(text):
            raise ValueError(f"{text!r:.120} is no {cls.__name__}")
        return super().__new__(cls, text)

    @classmethod
    def read(cls, text: object) -> Self | None:
        """The identifier, or None if the text is not of this form."""
        return cls(text) if isinstance(text, str) and cls.matches(text) else None

    @classmethod
    def matches(cls, text: str) -> bool:
        return cls._FORM.fullmatch(text) is not None


class RepositoryName(Identifier):
    """A model's repository, `owner/name`, by the rules of the hub's client."""

    __slots__ = ()
    _FORM: ClassVar = re.compile(
        r"(?!.*(?:--|\.\.|\.git\Z))\w(?:[\w.-]{0,94}\w)?/\w(?:[\w.-]{0,94}\w)?", re.ASCII
    )


class Revision(Identifier):
    """A branch, a tag or a commit."""

    __slots__ = ()
    _FORM: ClassVar = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


class Commit(Revision):
    """The full hash of a commit."""

    __slots__ = ()
    _FORM: ClassVar = re.compile(r"[0-9a-f]{40}")


class FileHash(Identifier):
    """The hash of a file, after which the hub's cache names its blob. 64 hex digits: the SHA-256 of
    its bytes. 40: the SHA-1 of what Git stores for it, which the hub has of small files."""

    __slots__ = ()
    _FORM: ClassVar = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class Sha256(FileHash):
    """SHA-256 of a file's bytes, in hex."""

    __slots__ = ()
    _FORM: ClassVar = re.compile(r"[0-9a-f]{64}")


class FilePath(Identifier):
    """The path of a file below a model's folder, with `/` between its parts."""

    __slots__ = ()

    @classmethod
    def matches(cls, text: str) -> bool:
        if not text.isprintable() or "\\" in text:  # surrogates are not printable
            return False
        parts = text.split("/")
        return not {"", ".", ".."} & {*parts} and all(
            len(os.fsencode(part)) <= _MAX_PART_BYTES for part in parts
        )


class FolderName(Identifier):
    """The id of a model as a path below exo-node's own folder: one part, or two."""

    __slots__ = ()
    _PART: ClassVar = re.compile(r"(?!\.)[^/\\\0]{1,200}")

    @classmethod
    def matches(cls, text: str) -> bool:
        parts = text.split("/")
        return len(parts) <= 2 and text.isprintable() and all(map(cls._PART.fullmatch, parts))
