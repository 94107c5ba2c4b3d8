"""The CPU time of tests: this process's and that of the processes they started.

`make test ARGS=--costs` prints it by room. Seconds of CPU and not of a clock, since tests share the
machine. A process counts for the test at whose end it has ended, so the sum of a file is right and
that of a test may not be. A process whose parent was killed, as a node's runners are, counts
nowhere.

A file of the core (see `conftest.SLOW_FILES`) that takes more than NAMED_S is named at the end. One
that takes more than REFUSED_S, and more than REFUSED_SHARE of the core, fails the run: CPU seconds
double where hyperthreads or other programs share a core, and shares do not. The limits are for a
file that is slow by mistake: twice what any file takes, since a busy machine must fail no test.
"""

import resource
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from pathlib import PurePath
from typing import Any

import pytest

NAMED_S = 5.0
REFUSED_S = 20.0
REFUSED_SHARE = 0.05

_spent = defaultdict[str, float](float)
"""Seconds of CPU by file."""
_quick = set[str]()
"""The files whose tests all belong to the core."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", action="store_true", help="print the CPU time of rooms and files")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    before = _cpu_s()
    try:
        return (yield)
    finally:
        file = item.nodeid.partition("::")[0]
        _spent[file] += _cpu_s() - before
        if item.get_closest_marker("core") and not item.get_closest_marker("smoke"):
            _quick.add(file)


def _cpu_s() -> float:
    usages = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usages)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist sends its sums to the one that prints them."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["costs"] = dict(_spent)
        output["quick"] = sorted(_quick)
    elif (
        too_dear(_spent, _quick, refused_s(_spent, _quick))
        and session.exitstatus == pytest.ExitCode.OK
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    _quick.update(output.get("quick", ()))
    for file, seconds in output.get("costs", {}).items():
        _spent[file] += seconds


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--costs"):
        terminalreporter.section("CPU seconds")
        for line in table(_spent):
            terminalreporter.write_line(line)
    if named := too_dear(_spent, _quick, NAMED_S):
        terminalreporter.section(
            f"core files over {NAMED_S:.0f} s of CPU"
            f" (over {refused_s(_spent, _quick):.0f} s the run fails):"
            " make them quicker, or list them in tests/conftest.py"
        )
        for file in named:
            terminalreporter.write_line(f"{_spent[file]:8.1f} {file}")


def refused_s(spent: Mapping[str, float], quick: Iterable[str]) -> float:
    """Seconds of a quick file that fail the run."""
    return max(REFUSED_S, REFUSED_SHARE * sum(spent[file] for file in quick))


def too_dear(spent: Mapping[str, float], quick: Iterable[str], limit_s: float) -> list[str]:
    """The quick files that took more than the limit, the dearest first."""
    over = [file for file in quick if spent[file] > limit_s]
    return sorted(over, key=lambda file: -spent[file])


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
