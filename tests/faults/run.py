"""Seeds each fault into a copy of the project and reports which test notices it.

    .venv/bin/python tests/faults/run.py                    # all faults
    .venv/bin/python tests/faults/run.py NAME ... --jobs 1  # some faults
    .venv/bin/python tests/faults/run.py --map              # first map lines to tests

`caught.json` holds the test that noticed each fault last time; it is tried first. If it is gone or
passes, the tests of the core that execute the changed lines are tried, the quickest first, as the
map of an earlier `--map` records them; without a map or for lines that it lacks, those of the same
folder. Then follow the tests that start processes, whose lines no map records. After the core the
slow tests are tried likewise. A test counts only if it passes without the fault.

The copies are clones of the last commit. The exit status is 1 if a fault was not noticed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree

from seeded_faults import FOLDER, PROJECT, Fault, load

CAUGHT = FOLDER / "caught.json"
MAP = PROJECT / ".fault_map"
"""The output of `--map`: coverage's database, and the seconds of each test."""
PROCESSES = ["tests/processes", "tests/dashboard"]
ROOMS = ("node", "placement", "proto", "shard", "mtp", "bench/exo_node_bench")
CORE = "core"
SECONDS_OF_A_TRY = 90.0
"""The most seconds of tests for one pytest process when they are tried by the map."""
PER_TEST_S = 180
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\[\s]+)?)", re.MULTILINE)
_CRASHED = re.compile(r'File "\S+?/(tests/\S+?\.py)", line \d+ in (test_\w+)')
"""The test in the stack of a process that a fault made crash."""
ITSELF = "tests/project/test_seeded_faults.py"
"""Ignored: it fails for every fault, since it looks for the text that the fault replaces."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The core test that noticed a fault, or if none did, another test."""

    core: str | None
    other: str | None = None

    @property
    def caught_by(self) -> str | None:
        return self.core or self.other


class Copy:
    """A clone of the project in which faults are seeded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        _ = subprocess.run(
            ["git", "clone", "--quiet", "--shared", str(PROJECT), str(folder)], check=True
        )

    def first_failure(
        self,
        tests: Iterable[str],
        *,
        only_core: bool,
        fault: Fault | None,
        skipped: Iterable[str] = (),
    ) -> str | None:
        """The first of these tests that fails, hangs or cannot be collected; None if all pass."""
        options = ["-m", CORE] if only_core else []
        for test in skipped:
            options += ["--deselect", test]
        if fault is not None:
            fault.apply(self._folder)
        try:
            process = self._pytest([*tests, "-x", *options])
        finally:
            if fault is not None:
                fault.revert(self._folder)
        if process.returncode in (0, 5):  # 5: nothing was selected
            return None
        if process.returncode == 4 and "not found" in process.stdout:
            raise SystemExit(
                f"{MAP.name} names tests that no longer exist; write it again with --map"
            )
        if (failed := _FAILED.search(process.stdout)) is not None:
            return failed[1]
        if process.returncode < 0 and (crashed := _CRASHED.search(process.stdout)) is not None:
            return f"{crashed[1]}::{crashed[2]}"
        raise RuntimeError(f"pytest ended with {process.returncode}:\n{process.stdout[-3000:]}")

    def _pytest(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        paths = (str(self._folder / name) for name in (".links", "bench"))
        return subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
                "--hypothesis-profile=unshrunk",
                *(
                    "--no-header",
                    "--tb=no",
                    "-rfE",
                    f"--timeout={PER_TEST_S}",
                    f"--ignore={ITSELF}",
                ),
                *arguments,
            ],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "1000"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )


class TestMap:
    """The map from lines to the tests that execute them, with their seconds."""

    def __init__(self) -> None:
        self._has_map = MAP.is_dir()

    @cached_property
    def _seconds(self) -> dict[str, float]:
        return json.loads((MAP / "seconds.json").read_text())

    def tests_of(self, fault: Fault) -> list[str]:
        """The tests that execute a changed line, the quickest first; none without a map."""
        if not self._has_map or not fault.file.endswith(".py"):
            return []
        import coverage

        data = coverage.CoverageData(str(MAP / "coverage"))
        data.read()
        tests = set[str]()
        for measured in data.measured_files():
            if measured.endswith("/" + fault.file):
                by_line = data.contexts_by_lineno(measured)
                for line in fault.lines():
                    tests.update(context.partition("|")[0] for context in by_line.get(line, ()))
        return sorted(tests & self._seconds.keys(), key=self._seconds.__getitem__)

    def passed(self, test: str) -> bool:
        """Whether this test passed when the map was made, without any fault."""
        return self._has_map and any(name.partition("[")[0] == test for name in self._seconds)

    def tries(self, fault: Fault) -> Iterator[list[str]]:
        """The tests of one fault in groups that take about as long as one try may."""
        group, spent = list[str](), 0.0
        for test in self.tests_of(fault):
            if group and (spent + self._seconds[test] > SECONDS_OF_A_TRY or len(group) == 200):
                yield group
                group, spent = [], 0.0
            group.append(test)
            spent += self._seconds[test]
        if group:
            yield group


def examine(fault: Fault, copy: Copy, last: Verdict, lines: TestMap, effort: str) -> Verdict:
    """Looks for a test that fails with the fault and passes without it: the one of last time, then
    the core, then the others."""
    slow = [last.other] if effort == "all" and last.other and _is_there(last.other) else []
    if slow and (caught := noticed_by(slow, fault, copy, lines, only_core=False)):
        return Verdict(None, caught)
    known = [[last.core]] if last.core and _is_there(last.core) else []
    folder = [[_mirror(fault)]]
    processes = [] if effort == "in-process" else [PROCESSES]
    for tests in (*known, *(list(lines.tries(fault)) or folder), *processes):
        if caught := noticed_by(tests, fault, copy, lines, only_core=True):
            return Verdict(caught)
    for tests in (*folder, *processes) if effort == "all" else ():
        if caught := noticed_by(tests, fault, copy, lines, only_core=False):
            return Verdict(None, caught)
    return Verdict(None)


def noticed_by(
    tests: list[str], fault: Fault, copy: Copy, lines: TestMap, *, only_core: bool
) -> str | None:
    """The first of these tests that fails with the fault and passes without it."""
    failing_anyway = list[str]()
    while True:
        failed = copy.first_failure(tests, only_core=only_core, fault=fault, skipped=failing_anyway)
        if failed is None:
            return None
        if (
            lines.passed(failed)
            or copy.first_failure([failed], only_core=False, fault=None) is None
        ):
            return failed
        failing_anyway.append(failed)


def _is_there(test: str) -> bool:
    """Whether a test that was recorded has still that name: pytest refuses one that it has not."""
    file, _, names = test.partition("::")
    function = names.rpartition("::")[2].partition("[")[0]
    path = PROJECT / file
    return path.exists() and (not function or f"def {function}(" in path.read_text())


def _mirror(fault: Fault) -> str:
    """The tests' folder for the fault's room: tests/shard/text for shard/text/codec.py."""
    folder = Path("tests") / Path(fault.file).parent
    while not (PROJECT / folder).is_dir():
        folder = folder.parent
    return str(folder)


def make_map() -> None:
    """Runs the core once and writes which lines each of its tests executes, and for how long."""
    shutil.rmtree(MAP, ignore_errors=True)
    MAP.mkdir()
    report = MAP / "tests.xml"
    _ = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--numprocesses", "auto", "--dist", "loadfile"),
            *("--no-loadscope-reorder", "-m", CORE, f"--junitxml={report}"),
            *(f"--cov={room}" for room in ROOMS),
            *("--cov-context=test", "--cov-report="),
        ],
        cwd=PROJECT,
        env={**os.environ, "COVERAGE_FILE": str(MAP / "coverage")},
        check=False,
    )
    seconds = {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}": float(
            case.get("time", 0)
        )
        for case in ElementTree.parse(report).iter("testcase")
        if case.find("failure") is None and case.find("error") is None
    }
    _ = (MAP / "seconds.json").write_text(json.dumps(seconds))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    _ = parser.add_argument("names", nargs="*", help="faults; all if none is named")
    _ = parser.add_argument("--jobs", type=int, default=2, help="faults at the same time")
    _ = parser.add_argument(
        "--effort",
        choices=("in-process", "core", "all"),
        default="all",
        help="in-process: the core without tests that start nodes, which takes minutes, not hours",
    )
    _ = parser.add_argument("--map", action="store_true", help="first write the map of tests")
    args = parser.parse_args()
    if args.map:
        make_map()
    faults = [f for f in load() if not args.names or f.name in args.names]
    if unknown := set(args.names) - {f.name for f in faults}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    recorded: dict[str, dict[str, str | None]] = (
        json.loads(CAUGHT.read_text()) if CAUGHT.exists() else {}
    )
    verdicts: dict[str, Verdict] = {}
    lines = TestMap()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copies = SimpleQueue[Copy]()
        for number in range(args.jobs):
            copies.put(Copy(Path(folder) / str(number)))

        def run(fault: Fault) -> tuple[Fault, Verdict]:
            copy = copies.get()
            try:
                last = Verdict(**recorded.get(fault.name, {"core": None}))
                return fault, examine(fault, copy, last, lines, args.effort)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(args.jobs) as pool:
            for future in as_completed([pool.submit(run, fault) for fault in faults]):
                fault, verdict = future.result()
                verdicts[fault.name] = verdict
                if verdict.caught_by or args.effort == "all":  # less effort disproves no record
                    recorded[fault.name] = {"core": verdict.core, "other": verdict.other}
                where = "core" if verdict.core else "other" if verdict.other else "NOT CAUGHT"
                print(f"{where:10} {fault.name}: {verdict.caught_by or fault.effect}", flush=True)
                _ = CAUGHT.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    return report(faults, verdicts)


def report(faults: list[Fault], verdicts: dict[str, Verdict]) -> int:
    """Prints the shares; 1 if a fault was not noticed."""
    core = sum(verdicts[f.name].core is not None for f in faults)
    missed = [f.name for f in faults if not verdicts[f.name].caught_by]
    other = len(faults) - core - len(missed)
    print(f"{len(faults)} faults: {core} caught by the core, {other} by other tests only")
    if missed:
        print("not caught:", ", ".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
