"""The SQLite database of responses, in a file or in memory, used by one thread.

A file is opened when it is needed. One that is damaged is renamed, never deleted, and a new one
begins.
"""

import asyncio
import contextlib
import logging
import sqlite3
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from ...placement.errors import ResponsesUnavailable
from ..machine.private_files import create_private
from .tables import SCHEMA, VERSION

_LOG: Final = logging.getLogger(__name__)

FILE: Final = "responses.db"
_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""The last one: a table or column is missing, since all statements fit the tables of a new file."""
_PRIMARY: Final = 0xFF
"""The bits of SQLite's result codes that extended ones share."""

Value = TypeVar("Value")
Work = Callable[[sqlite3.Connection], Value]


class Database:
    """A database in memory, which ends with the process: none of it is ever on a disk.

    `patience_s`: how long `run` waits for work that does not end, its own or that before it.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._connection: sqlite3.Connection | None = None
        self._calls = 0
        """Work that has ended."""

    async def exists(self) -> bool:
        """Whether anything was stored. Raises ResponsesUnavailable if a disk does not answer."""
        return await self._in_thread(self._exists)

    async def run(self, work: Work[Value]) -> Value:
        """Runs `work` in one transaction, which is on the disk when this returns.

        Raises ResponsesUnavailable, after which nothing of it is stored, and what `work` raises.
        """
        return await self._in_thread(lambda: self._transaction(work))

    async def close(self) -> None:
        """Returns when the file is closed, or when the disk does not answer in time."""
        with contextlib.suppress(ResponsesUnavailable):
            await self._in_thread(self._close)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, call: Callable[[], Value]) -> Value:
        def counted() -> Value:
            try:
                return call()
            finally:
                self._calls += 1

        running = asyncio.get_running_loop().run_in_executor(self._thread, counted)
        running.add_done_callback(_take_error)
        calls = -1
        while calls != self._calls:  # work of others that ends is no sign of a bad disk
            calls = self._calls
            if (await asyncio.wait((running,), timeout=self._patience_s))[0]:
                return running.result()
        raise ResponsesUnavailable(
            "the disk with the stored responses does not answer; see whether it works"
        )

    def _transaction(self, work: Work[Value]) -> Value:
        try:
            return self._attempt(work)
        except (sqlite3.Error, MemoryError) as fault:
            raise ResponsesUnavailable(
                f"this response cannot be kept in memory ({fault or 'there is too little'}); send "
                'the whole conversation, or "store": true'
            ) from fault

    def _attempt(self, work: Work[Value]) -> Value:
        connection = self._opened()
        _ = connection.execute("BEGIN IMMEDIATE")
        try:
            value = work(connection)
            _ = connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                _ = connection.execute("ROLLBACK")
        return value

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            _prepare(connection)
            self._connection = connection
        return self._connection

    def _exists(self) -> bool:
        return self._connection is not None

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):  # it is given up in any case
                connection.close()


class FileDatabase(Database):
    """The file in `folder`, which is created with it.

    `patience_s`: how long `run` waits for the disk.
    """

    def __init__(self, folder: Path, patience_s: float) -> None:
        super().__init__(patience_s)
        self._folder = folder
        self._path = folder / FILE
        self._file: tuple[int, int] | None = None
        """The device and inode of the open file."""

    def _transaction(self, work: Work[Value]) -> Value:
        try:
            try:
                return self._attempt(work)
            except (sqlite3.DatabaseError, UnicodeDecodeError) as fault:
                if not _is_damage(fault):
                    raise
                self._set_aside(str(fault))
            return self._attempt(work)
        except sqlite3.Error as fault:
            self._close()
            raise ResponsesUnavailable(
                f"stored responses cannot be used ({fault}); {_remedy(fault)}"
            ) from fault
        except OSError as fault:
            self._close()
            raise ResponsesUnavailable(
                f"stored responses cannot be used ({fault.strerror}); check the permissions of the "
                f"data folder's {self._folder.name} and the space on its disk"
            ) from fault

    def _opened(self) -> sqlite3.Connection:
        """The connection to the file that has the name now: another may have been deleted."""
        if self._connection is not None and self._file == self._file_now():
            return self._connection
        self._close()
        # Not its parents: a data folder that has disappeared must not come back empty.
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.is_symlink():  # another folder's permissions are not ours
            raise ResponsesUnavailable(f"{self._folder} is a link; put a folder there")
        self._folder.chmod(0o700)
        if not self._path.exists():
            create_private(self._path, b"")
        if not stat.S_ISREG(self._path.lstat().st_mode):
            raise ResponsesUnavailable(f"the data folder's {FILE} is no file; remove it")
        self._path.chmod(0o600)
        with contextlib.ExitStack() as unless_prepared:
            connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            _ = unless_prepared.callback(connection.close)
            _prepare(connection)
            _ = unless_prepared.pop_all()
        self._connection, self._file = connection, self._file_now()
        return connection

    def _exists(self) -> bool:
        """Closes a file that was removed: it takes space until then."""
        exists = self._path.exists()
        if not exists:
            self._close()
        return exists

    def _file_now(self) -> tuple[int, int] | None:
        try:
            status = self._path.lstat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _set_aside(self, why: str) -> None:
        """Renames the file with what SQLite has beside it."""
        self._close()
        name = f"{FILE}.damaged-{time.time_ns()}"
        for ending in ("", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                _ = (self._folder / f"{FILE}{ending}").rename(self._folder / f"{name}{ending}")
        _LOG.error(
            "the stored responses in %s are damaged (%s): they are now in %s, and a new file "
            "begins",
            self._path,
            why,
            name,
        )

    def _close(self) -> None:
        self._file = None
        super()._close()


def _prepare(connection: sqlite3.Connection) -> None:
    """Checks the version of an open file, and makes the tables of a new one."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, VERSION):
        is_newer = version > VERSION
        age, remedy = ("a newer", "update this one, or move") if is_newer else ("an older", "move")
        raise ResponsesUnavailable(
            f"the data folder's {FILE} is from {age} exo-node; {remedy} the file away"
        )
    # Deleted text is overwritten, and the file becomes smaller again.
    for pragma in (
        "secure_delete = ON",
        "foreign_keys = ON",
        "synchronous = FULL",
        "temp_store = MEMORY",  # sorted text goes into no other file
    ):
        _ = connection.execute(f"PRAGMA {pragma}")
    if version == 0:
        _ = connection.execute("PRAGMA auto_vacuum = FULL")
        tables = f"{SCHEMA}PRAGMA user_version = {VERSION};"
        _ = connection.executescript(f"BEGIN IMMEDIATE;{tables}COMMIT;")


def _take_error(ended: "asyncio.Future[Value]") -> None:
    """Retrieves the error of work that a slow disk ended after its caller had given up."""
    if not ended.cancelled():
        _ = ended.exception()


def _is_damage(fault: sqlite3.DatabaseError | UnicodeDecodeError) -> bool:
    """Whether the file is damaged.

    Python raises UnicodeDecodeError where SQLite's message quotes damaged bytes, and an
    OperationalError without a code for damaged text.
    """
    if isinstance(fault, UnicodeDecodeError):
        return True
    code: int | None = getattr(fault, "sqlite_errorcode", None)
    if code is None:
        return isinstance(fault, sqlite3.OperationalError)
    return code & _PRIMARY in _DAMAGE


def _remedy(fault: sqlite3.Error) -> str:
    match getattr(fault, "sqlite_errorname", "").removeprefix("SQLITE_").partition("_")[0]:
        case "FULL":
            return (
                "free space on the disk, of which a deletion needs some, too; removing the folder "
                f"of {FILE} needs none and deletes all responses"
            )
        case "BUSY" | "LOCKED":
            return "close the other program that has it open"
        case _:
            return f"check the permissions of the data folder's {FILE} and the space on its disk"
