"""Measures the costs of a node: time to help, to status and to readiness, memory and idle CPU.

python bench/footprint.py [--repeats 15] [--idle-s 20]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

COMMAND = str(Path(sys.executable).parent / "exo-node")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a node costs")
    _ = parser.add_argument("--repeats", type=int, default=15)
    _ = parser.add_argument("--idle-s", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        ready = [_time_to_ready(Path(scratch) / f"r{i}") for i in range(options.repeats)]
        node = _start(Path(scratch) / "node")
        try:
            _wait_ready(Path(scratch) / "node")
            flags = ["--data-dir", str(Path(scratch) / "node")]
            help_s = _timed([COMMAND, "--help"], options.repeats)
            status_s = _timed([COMMAND, "status", *flags], options.repeats)
            small = psutil.Process(node.pid).memory_info().rss
            _ = subprocess.run([COMMAND, "chat", *flags, "Who are you?"], capture_output=True)
            _idle(node.pid, options.idle_s, small)
        finally:
            node.terminate()
            _ = node.wait()
    print(_row("exo-node --help, s", help_s))
    print(_row("exo-node status, s", status_s))
    print(_row("start to ready, s", ready))


def _idle(pid: int, seconds: float, before: int) -> None:
    node = psutil.Process(pid)
    [runner] = node.children()
    start = [sum(p.cpu_times()[:2]) for p in (node, runner)]
    time.sleep(seconds)
    used = [sum(p.cpu_times()[:2]) - was for p, was in zip((node, runner), start, strict=True)]
    print(f"node, before a model: {before / 1e6:.0f} MB resident")
    for name, process, spent in zip(("node", "runner"), (node, runner), used, strict=True):
        rss = process.memory_info().rss / 1e6
        print(f"{name}, demo loaded: {rss:.0f} MB resident, idle CPU {100 * spent / seconds:.2f} %")


def _timed(command: list[str], repeats: int) -> list[float]:
    def run() -> float:
        start = time.perf_counter()
        _ = subprocess.run(command, capture_output=True, check=True)
        return time.perf_counter() - start

    _ = run()
    return [run() for _ in range(repeats)]


def _time_to_ready(data_dir: Path) -> float:
    start = time.perf_counter()
    node = _start(data_dir)
    _wait_ready(data_dir)
    took = time.perf_counter() - start
    node.terminate()
    _ = node.wait()
    return took


def _start(data_dir: Path) -> "subprocess.Popen[bytes]":
    flags = ["--interface", "127.0.0.1", "--no-mdns", "--port", "0", "--grpc-port", "0"]
    return subprocess.Popen(
        [COMMAND, "start", "--data-dir", str(data_dir), *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _wait_ready(data_dir: Path) -> None:
    """The run file appears when HTTP answers."""
    _until(lambda: (data_dir / "node.json").exists())
    _ = json.loads((data_dir / "node.json").read_text())


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the node did not become ready within 30 s")
        time.sleep(0.005)


def _row(name: str, seconds: list[float]) -> str:
    middle = statistics.median(seconds)
    return f"{name}: {middle:.3f} ({min(seconds):.3f}-{max(seconds):.3f})"


if __name__ == "__main__":
    main()
