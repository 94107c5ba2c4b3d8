"""Runners that write down which attempt they ran: the proof that no stage went back to an old one.

An interpreter of its own starts the nodes, whose runners load this module before their own code;
nothing in the product knows of it.
"""

import os
import sys
import sysconfig
import time
import venv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_START = "#!{python}\nimport sys\n\nfrom exo_node.node.cli.main import main\n\nsys.exit(main())\n"


@dataclass(frozen=True, slots=True)
class Seen:
    """Counts over all runners; `went_back`: forwards of an attempt after one of a newer attempt."""

    forwards: int
    requests: int
    resumed: int
    """Requests of which a runner saw more than one attempt."""
    went_back: int


def witnessed(folder: Path, log: Path) -> str:
    """An `exo-node` command whose runners append a line to `log` for each forward."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    libraries = next(iter(folder.glob("lib/python*/site-packages")))
    inherited = sysconfig.get_paths()["purelib"]
    first = f"import site; site.addsitedir({inherited!r}); sys.path.append({_HERE!r})"
    then = f"import witness; witness.install({str(log)!r})"
    _ = (libraries / "witness.pth").write_text(f"{first}\n{then}\n")
    command = folder / "bin" / "exo-node"
    _ = command.write_text(_START.format(python=python))
    command.chmod(0o755)
    return str(command)


_HERE = str(Path(__file__).parent)


def install(log: str) -> None:
    """In a runner, makes its stage write; in any other process nothing."""
    if "exo_node.shard.runner.main" not in sys.orig_argv:
        return
    from exo_node.shard.engine.stage import StageOutput, StageWorker
    from exo_node.shard.pipeline.frames import HiddenBlock

    forward = StageWorker.forward
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def record(self: StageWorker, block: HiddenBlock) -> StageOutput:
        passed = forward(self, block)
        refused = {key for key, _ in passed.faults}
        now, process = time.monotonic_ns(), os.getpid()
        ran = [member for member in block.members if member.key not in refused]
        lines = [f"{now} {process} {member.request} {member.attempt}\n" for member in ran]
        _ = os.write(file, "".join(lines).encode())
        return passed

    StageWorker.forward = record


def read(log: Path) -> Seen:
    return judge(log.read_text().splitlines() if log.exists() else [])


def judge(lines: Iterable[str]) -> Seen:
    """`time process request attempt` each, in the order in which a process wrote them."""
    attempts: dict[tuple[str, str], list[int]] = defaultdict(list)
    for line in lines:
        _, process, request, attempt = line.split()
        attempts[process, request].append(int(attempt))
    return Seen(
        forwards=sum(len(each) for each in attempts.values()),
        requests=len({request for _, request in attempts}),
        resumed=len({request for (_, request), each in attempts.items() if len(set(each)) > 1}),
        went_back=sum(_went_back(each) for each in attempts.values()),
    )


def _went_back(attempts: Iterable[int]) -> int:
    newest = count = 0
    for attempt in attempts:
        count += attempt < newest
        newest = max(newest, attempt)
    return count
