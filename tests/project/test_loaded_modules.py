"""The heavy libraries that a process of each kind loads, seen in fresh interpreters."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_node_process_loads_no_mlx() -> None:
    files = [f for f in sorted((ROOT / "node").rglob("*.py")) if f.stem[0] != "_"]
    modules = [".".join(("exo_node", *f.relative_to(ROOT).with_suffix("").parts)) for f in files]
    assert {"exo_node.node.run", "exo_node.node.cli.main"} <= set(modules)
    assert _loaded_with(*modules) == set()


def test_a_bench_of_servers_and_the_command_of_the_other_one_load_no_mlx() -> None:
    names = ("serve.command", "serve.session", "mtp.command")
    assert _loaded_with(*(f"exo_node_bench.{name}" for name in names)) == set()


def test_the_same_check_finds_mlx_in_a_runner() -> None:
    assert {"mlx", "mlx_lm"} <= _loaded_with("exo_node.shard.runner.main")


def _loaded_with(*modules: str) -> set[str]:
    """The heavy libraries in a fresh interpreter that imported `modules`."""
    script = f"import sys, {', '.join(modules)}\nprint(*sys.modules)"
    command = [sys.executable, "-P", "-c", script]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return {"mlx", "mlx_lm", "transformers", "torch"}.intersection(loaded)
