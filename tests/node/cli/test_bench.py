"""`exo-node bench` without the package of its benches, and with one that does not fit."""

import subprocess
import sys
from pathlib import Path

import pytest
from api_stub import environment

_RUN = """
import sys
{before}
from exo_node.node.cli.main import main
main()
"""
_MISSING = """
class Missing:
    def find_spec(name, path=None, target=None):
        if name == "exo_node_bench":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing)
"""


def run(before: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _RUN.format(before=before), "bench", *arguments]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("mtp", "demo", "--k", "1,2", "--output", "out"),
        ("serve", "-h"),
        ("serve", "--server", "a=http://127.0.0.1:1", "--concurrency=1,4", "--nonsense"),
    ],
    ids=" ".join,
)
def test_without_the_package_its_commands_are_one_sentence(arguments: tuple[str, ...]) -> None:
    process = run(_MISSING, *arguments)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == (
        f"exo-node: bench {arguments[0]}: the package exo-node-bench is missing; "
        "`pip install 'exo-node[bench]'`, or in a checkout `pip install ./bench`, adds it\n"
    )


def test_without_the_package_the_help_is_whole() -> None:
    listing = run(_MISSING, "--help").stdout
    assert all(f"  {name} " in listing for name in ("mtp", "serve"))


def test_a_package_that_does_not_fit_is_named_with_its_fault(tmp_path: Path) -> None:
    folder = tmp_path / "exo_node_bench" / "mtp"
    folder.mkdir(parents=True)
    _ = (folder / "command.py").write_text("from exo_node.node.cli import nothing_like_it\n")
    process = run(f"sys.path.insert(0, {str(tmp_path)!r})", "serve", "--repeats", "2")
    assert process.returncode == 2
    assert "bench serve: the package exo-node-bench does not fit (" in process.stderr
    assert "nothing_like_it" in process.stderr
    assert process.stderr.count("\n") == 1
