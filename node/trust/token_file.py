"""The API tokens of a data folder on disk, created, listed and revoked while its node runs or not.

Only SHA-256 digests are stored. A token is 256 random bits, so a salt or a slow hash would protect
nothing, and a slow hash would let anyone keep the node busy with wrong tokens. The last uses are in
a file of their own, which only the node writes, so no write of the node restores a revoked token.
"""

import hashlib
import os
import secrets
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ...placement.errors import ExoNodeError, InvalidRequest, InvalidSettings
from ..machine.background_reads import read_regular
from ..machine.private_files import lock_exclusively, replace_private, update_private

TOKENS_FILE: Final = "api.tokens"
USES_FILE: Final = "api.tokens.used"
_LOCK_FILE: Final = "api.tokens.lock"
_PREFIX: Final = "exo-"
"""Scanners for leaked secrets search for such prefixes."""
_BYTES: Final = 32
_MAX_TOKENS: Final = 256
_MAX_NAME: Final = 64
_FILE_LIMIT: Final = 1024 * 1024
_LOCK_TRIES: Final = 250

Uses = Mapping[str, int]
"""The last use of each token, in seconds since 1970, by its id."""


class StoredToken(BaseModel):
    """A token on disk; `created` in seconds since 1970."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    created: Annotated[int, Field(ge=0)]

    @property
    def id(self) -> str:
        """The beginning of the digest: a later token of the same name has another id."""
        return self.sha256[:16]


class TokenFile(BaseModel):
    """The file as it is stored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal[1] = 1
    tokens: Annotated[tuple[StoredToken, ...], Field(max_length=_MAX_TOKENS)] = ()
    off: bool = False
    """There is no token, and the node's user chose that no key is required."""


_USES: Final = TypeAdapter(dict[str, Annotated[int, Field(ge=0, lt=2**40)]])


def digest(token: bytes) -> str:
    """The hex digest that is stored in place of a token."""
    return hashlib.sha256(token).hexdigest()


def read_tokens(data_dir: Path) -> tuple[StoredToken, ...] | None:
    """Reads the tokens; None where no key is asked for. Raises InvalidSettings."""
    file = read_token_file(data_dir)
    return None if file is None or file.off else file.tokens


def read_token_file(data_dir: Path) -> TokenFile | None:
    """Reads the file; None where there is none. Raises InvalidSettings for an unsafe one."""
    path = data_dir / TOKENS_FILE
    try:
        content, status = read_regular(path, _FILE_LIMIT, os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as fault:
        raise _unusable(path, fault.strerror or "it cannot be read") from fault
    _check_owner(path, status)
    try:
        return TokenFile.model_validate_json(content)
    except ValidationError:
        # `from None`: pydantic's own text repeats what the file holds.
        raise _unusable(path, "it is damaged") from None


def has_token(data_dir: Path) -> bool:
    """Whether there is a token. Raises InvalidSettings as `read_tokens` does."""
    return bool(read_tokens(data_dir))


def create_token(data_dir: Path, name: str) -> str:
    """Creates a token and returns its text, which is stored nowhere. Raises ExoNodeError."""
    check_new_name(name)
    token = _PREFIX + secrets.token_urlsafe(_BYTES)
    stored = StoredToken(name=name, sha256=digest(token.encode()), created=int(time.time()))
    with _changing(data_dir) as tokens:
        if any(each.name == name for each in tokens):
            raise InvalidRequest(
                f"there is a token with the name '{name}'; choose another, or revoke it first",
                param="NAME",
            )
        if len(tokens) >= _MAX_TOKENS:
            raise InvalidRequest(f"there are {_MAX_TOKENS} tokens; revoke one first", param="NAME")
        _write(data_dir, (*tokens, stored))
    return token


def revoke_token(data_dir: Path, name: str) -> int:
    """Revokes a token; returns the number of the others. Raises ExoNodeError for unknown names."""
    _check_name(name)
    unknown = InvalidRequest(f"there is no token with the name '{name}'", param="NAME")
    if read_tokens(data_dir) is None:
        raise unknown
    with _changing(data_dir) as tokens:
        others = tuple(each for each in tokens if each.name != name)
        if len(others) == len(tokens):
            raise unknown
        _write(data_dir, others)
    return len(others)


def turn_off(data_dir: Path) -> int:
    """Revokes all tokens and has no key asked for; returns their number. Raises ExoNodeError."""
    if read_tokens(data_dir) is None:
        return 0
    with _changing(data_dir) as tokens:
        _write(data_dir, (), off=True)
    return len(tokens)


def read_uses(data_dir: Path) -> Uses:
    """Reads the last uses; empty where the file is absent or damaged, as they are only shown."""
    try:
        content, _ = read_regular(data_dir / USES_FILE, _FILE_LIMIT)
        return _USES.validate_json(content, strict=True)
    except (OSError, ValidationError):
        return {}


def write_uses(data_dir: Path, uses: Uses) -> None:
    """Replaces the last uses. Raises OSError, and leaves the old ones."""
    update_private(data_dir / USES_FILE, _USES.dump_json(dict(uses)))


def _check_name(name: str) -> None:
    if 0 < len(name) <= _MAX_NAME and name.isprintable() and name == name.strip():
        return
    # The name is not repeated: it may be a megabyte, or draw on the terminal.
    raise InvalidRequest(
        f"a token's name is 1 to {_MAX_NAME} printable characters, without spaces around it",
        param="NAME",
    )


def check_new_name(name: str) -> None:
    """Checks that programs may put the name into a path or command; older tokens may differ.

    Raises InvalidRequest.
    """
    _check_name(name)
    if not name[0].isalnum() or not all(each.isalnum() or each in " ._@+-" for each in name):
        raise InvalidRequest(
            "a token's name begins with a letter or digit and has letters, digits, spaces and "
            ". _ @ + - only",
            param="NAME",
        )


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise _unusable(path, "it is another user's")
    if status.st_mode & 0o077:
        raise _unusable(path, "others may read or write it; `chmod 600` it")


def _unusable(path: Path, why: str) -> InvalidSettings:
    return InvalidSettings(
        f"{path} cannot be used: {why}; until it is put right or removed and tokens are created "
        "anew, none is accepted",
        param=str(path),
    )


def _write(data_dir: Path, tokens: tuple[StoredToken, ...], *, off: bool = False) -> None:
    text = TokenFile(tokens=tokens, off=off).model_dump_json(exclude=set() if off else {"off"})
    replace_private(data_dir / TOKENS_FILE, text.encode())


@contextmanager
def _changing(data_dir: Path) -> Generator[tuple[StoredToken, ...]]:
    """Yields the tokens and holds the lock of the file, so that no other change comes between."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if data_dir.stat().st_uid != os.geteuid():
            raise InvalidSettings(
                f"{data_dir} is another user's, whose node would not read your file; run this as "
                "the node's user",
                param="--data-dir",
            )
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(data_dir / _LOCK_FILE, flags, 0o600)
        try:
            if not lock_exclusively(descriptor, _LOCK_TRIES):
                raise ExoNodeError("another `exo-node token` does not end; nothing was changed")
            yield read_tokens(data_dir) or ()
        finally:
            os.close(descriptor)
    except OSError as fault:
        raise ExoNodeError(
            f"{data_dir / TOKENS_FILE} cannot be written: {fault.strerror}; nothing was changed"
        ) from fault
