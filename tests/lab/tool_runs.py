"""Runs real coding tools, each in its own folder, with a home of their own."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

import pytest
from nodes import Node

RUN_S = 580
"""Long, so that a loaded machine fails no test."""


def skip_without(tool: str, install: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed: {install}")


def run_tool(
    work: Path, name: str, words: Sequence[str], stdin: str = ""
) -> "subprocess.CompletedProcess[str]":
    home = {"HOME": str(work / "home"), "PWD": str(work / name)}
    foreign = ("EXO_", "XDG_", "CLAUDE", "COPILOT", "CLINE")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return subprocess.run(
        words,
        cwd=work / name,
        env=environment | home,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


def counter(served: Node, model: str, name: str) -> int:
    """A counter of the node's metrics."""
    with urlopen(f"http://127.0.0.1:{served.port}/metrics") as reply:
        page = reply.read().decode()
    line = re.search(rf'^vllm:{name}_total{{.*model_name="{model}".*}} (\S+)$', page, re.MULTILINE)
    assert line is not None
    return int(float(line[1]))


def version(name: str) -> str:
    ended = subprocess.run([name, "--version"], capture_output=True, text=True, check=False)
    return ended.stdout.strip()
