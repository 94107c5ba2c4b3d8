"""Keeps the machine from sleeping while it works for somebody, and notices that it slept.

A sleeping machine ends the answers that run on it, and its cluster notices only after a timeout.
Afterwards other nodes have closed their connections, addresses may be others, and what waits for a
timeout would wait for minutes.
"""

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Final, Literal

log = logging.getLogger(__name__)

KeepAwake = Literal["answers", "always", "never"]

_LOOK_EVERY_S: Final = 1.0
_LINGER_S: Final = 30.0
"""A conversation's next turn should not find the machine asleep. macOS and Linux desktops wait for
minutes of idleness, so a shorter gap between two assertions changes nothing."""
_END_S: Final = 2.0
"""How long a command may take to end before it is killed."""
_SOON_S: Final = 10.0
_MOST_ENDS: Final = 5
"""A command that ended so often so soon was killed by no person: it does not work here."""
_PASSING: Final = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
_MOST_STDERR: Final = 500
_SLEPT_S: Final = 30.0
"""Shorter pauses cut no connection of a cluster on a LAN; a busy machine has some of seconds."""


def inhibitor(system: str, pid: int) -> tuple[str, ...]:
    """The command that prevents idle sleep until it ends, as it does when the process `pid` ends.

    The display may go dark, and a lid or a menu may still send the machine to sleep: see
    caffeinate(8) and systemd-inhibit(1).
    """
    if system == "darwin":
        return ("caffeinate", "-i", "-w", str(pid))
    reason = ("--who=exo-node", "--why=answers of a language model", "--mode=block")
    wait = ("tail", f"--pid={pid}", "-f", "/dev/null")
    return ("systemd-inhibit", "--what=sleep:idle", *reason, *wait)


class Awake:
    """Holds a power assertion while `is_working()`, and for half a minute afterwards."""

    def __init__(
        self,
        when: Callable[[], KeepAwake],
        is_working: Callable[[], bool],
        on_refusal: Callable[[str], None],
    ) -> None:
        """`on_refusal` is called with the reason where the system does not let it."""
        self._when = when
        self._is_working = is_working
        self._on_refusal = on_refusal
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: int | None = None
        self._began, self._ends = 0.0, 0
        """When the command began, and how often one ended soon after it had begun."""

    async def run(self) -> None:
        """Looks once a second, until cancelled. Returns where the system does not let it."""
        command = inhibitor(sys.platform, os.getpid())
        if shutil.which(command[0]) is None:
            return self._refuse(f"{command[0]} is missing")
        now = asyncio.get_running_loop().time
        until = now()
        try:
            while True:
                when = self._when()
                if when == "always" or self._is_working():
                    until = now() + _LINGER_S
                if now() >= until or when == "never":
                    await self._release()
                elif refusal := await self._hold(command):
                    return self._refuse(refusal)
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            await self._release()

    def _refuse(self, why: str) -> None:
        text = f"this machine may sleep while it answers: {why}"
        if self._when() != "never":
            log.info("%s", text)
        self._on_refusal(text)

    async def _hold(self, command: tuple[str, ...]) -> str:
        """Makes the assertion, again where somebody ended it; why the system refused it, or ""."""
        if (process := self._process) is not None:
            if process.returncode is None:
                return ""
            self._ends = self._ends + 1 if time.monotonic() - self._began < _SOON_S else 0
            if process.returncode > 0 or self._ends >= _MOST_ENDS:
                message = self._stderr_text() or f"it ended with {process.returncode}"
                return f"{command[0]}: {message}"
        self._process = None
        self._close_stderr()
        try:
            # A pipe of asyncio would wait for children that the command leaves behind.
            self._stderr, writing = os.pipe()
            with open(writing, "wb") as stderr:
                quiet, self._began = asyncio.subprocess.DEVNULL, time.monotonic()
                self._process = await asyncio.create_subprocess_exec(
                    *command, stdin=quiet, stdout=quiet, stderr=stderr
                )
        except OSError as fault:
            return "" if fault.errno in _PASSING else f"{command[0]}: {fault.strerror}"
        return ""

    def _stderr_text(self) -> str:
        """The beginning of what the command wrote of its error."""
        if self._stderr is None:
            return ""
        os.set_blocking(self._stderr, False)
        with contextlib.suppress(BlockingIOError):  # a child of it may have the other end open
            return os.read(self._stderr, _MOST_STDERR).decode(errors="replace").strip()
        return ""

    def _close_stderr(self) -> None:
        stderr, self._stderr = self._stderr, None
        if stderr is not None:
            os.close(stderr)

    async def _release(self) -> None:
        process, self._process = self._process, None
        self._close_stderr()
        if process is None:
            return
        for end in (process.terminate, process.kill):
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                end()
                async with asyncio.timeout(_END_S):
                    _ = await process.wait()
                    return


def seconds() -> float:
    """A clock that runs while the machine sleeps, and that cannot be set."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.clock_gettime(time.CLOCK_MONOTONIC)  # it stands still on Linux only


class WakeWatch:
    """Calls `on_wake` with the seconds of each pause that was longer than half a minute."""

    def __init__(
        self, on_wake: Callable[[float], Awaitable[None]], clock: Callable[[], float] = seconds
    ) -> None:
        """`on_wake` waits for nothing: the watch does not look meanwhile."""
        self._on_wake = on_wake
        self._clock = clock

    async def run(self) -> None:
        before = self._clock()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            before, passed = (now := self._clock()), now - before
            if passed - _LOOK_EVERY_S >= _SLEPT_S:
                await self._on_wake(passed)
