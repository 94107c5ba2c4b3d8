"""What tests cost: seconds of CPU by room, of this process and of those that it started.

`make test ARGS=--costs` prints them. Seconds of CPU and not of a clock: tests share the machine.
A process counts for the test at whose end it has ended, so that a file's sum is right and a test's
may not be. One whose parent was killed, as a node's runners are, counts nowhere.
"""

import resource
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from pathlib import PurePath
from typing import Any

import pytest

_spent = defaultdict[str, float](float)
"""By file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", action="store_true", help="print the CPU time of rooms and files")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    before = _cpu_s()
    try:
        return (yield)
    finally:
        _spent[item.nodeid.partition("::")[0]] += _cpu_s() - before


def _cpu_s() -> float:
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where pytest-xdist runs this process, its sums go to the one that prints them."""
    told: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["costs"] = dict(_spent)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for file, seconds in getattr(node, "workeroutput", {}).get("costs", {}).items():
        _spent[file] += seconds


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--costs"):
        return
    terminalreporter.section("CPU seconds")
    for line in table(_spent):
        terminalreporter.write_line(line)


def table(spent: Mapping[str, float]) -> Iterable[str]:
    """Rooms, the dearest first, with the three dearest files of each."""
    yield f"{sum(spent.values()):8.1f} in all"
    rooms = defaultdict[str, list[tuple[float, str]]](list)
    for file, seconds in spent.items():
        rooms[room_of(file)].append((seconds, PurePath(file).stem.removeprefix("test_")))
    for room, files in sorted(rooms.items(), key=lambda each: -sum(s for s, _ in each[1])):
        named = ", ".join(f"{name} {seconds:.0f}" for seconds, name in sorted(files)[:-4:-1])
        yield f"{sum(seconds for seconds, _ in files):8.1f} {room:18} {named}"


def room_of(file: str) -> str:
    """Its folder: tests/shard/engine/test_x.py is of shard/engine."""
    return "/".join(PurePath(file).parent.parts[1:])
