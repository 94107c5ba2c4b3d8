"""Measures the costs of a node: time to help, to status and to readiness, memory and idle CPU.

python bench/footprint.py [--repeats 15] [--idle-s 20]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import psutil
from nodes import COMMAND, node, start_process


def main() -> None:
    parser = argparse.ArgumentParser(description="What a node costs")
    _ = parser.add_argument("--repeats", type=int, default=15)
    _ = parser.add_argument("--idle-s", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        ready = [_time_to_ready(Path(scratch) / f"r{i}") for i in range(options.repeats)]
        with node(Path(scratch) / "node", "--no-mdns") as running:
            pid, flags = running.process.pid, ["--data-dir", str(running.data_dir)]
            help_s = _timed([COMMAND, "--help"], options.repeats)
            status_s = _timed([COMMAND, "status", *flags], options.repeats)
            small = psutil.Process(pid).memory_info().rss
            _ = subprocess.run([COMMAND, "chat", *flags, "Who are you?"], capture_output=True)
            _idle(pid, options.idle_s, small)
    print(_row("exo-node --help, s", help_s))
    print(_row("exo-node status, s", status_s))
    print(_row("start to ready, s", ready))


def _idle(pid: int, seconds: float, before: int) -> None:
    process = psutil.Process(pid)
    [runner] = process.children()
    start = [sum(p.cpu_times()[:2]) for p in (process, runner)]
    time.sleep(seconds)
    used = [sum(p.cpu_times()[:2]) - was for p, was in zip((process, runner), start, strict=True)]
    print(f"node, before a model: {before / 1e6:.0f} MB resident")
    for name, each, spent in zip(("node", "runner"), (process, runner), used, strict=True):
        rss = each.memory_info().rss / 1e6
        print(f"{name}, demo loaded: {rss:.0f} MB resident, idle CPU {100 * spent / seconds:.2f} %")


def _timed(command: list[str], repeats: int) -> list[float]:
    def run() -> float:
        start = time.perf_counter()
        _ = subprocess.run(command, capture_output=True, check=True)
        return time.perf_counter() - start

    _ = run()
    return [run() for _ in range(repeats)]


def _time_to_ready(data_dir: Path) -> float:
    """The run file appears when HTTP answers; `node` looks for it too seldom for this."""
    start = time.perf_counter()
    process = start_process(data_dir, "--no-mdns")
    try:
        while not (data_dir / "node.json").exists():
            if process.poll() is not None:
                raise SystemExit((data_dir / "log").read_text())
            time.sleep(0.005)
        return time.perf_counter() - start
    finally:
        process.kill()
        _ = process.wait()


def _row(name: str, seconds: list[float]) -> str:
    middle = statistics.median(seconds)
    return f"{name}: {middle:.3f} ({min(seconds):.3f}-{max(seconds):.3f})"


if __name__ == "__main__":
    main()
