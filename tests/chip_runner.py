"""A runner's process on one of `chips.CHIPS`: the product has no way to ask for that.

`chip_python` makes a program that stands in for `sys.executable` where runners are started.
"""

import runpy
import shlex
import sys
from pathlib import Path

RUNNER = "exo_node.shard.runner.main"


def chip_python(folder: Path, chip: str, deviation: float) -> str:
    """A program that starts as Python does, and runs runners on `chip`."""
    program = folder / "python"
    words = [sys.executable, "-P", __file__, chip, str(deviation)]
    text = f'#!/bin/sh\n[ "$3" = {RUNNER} ] || exec {shlex.quote(sys.executable)} "$@"\n'
    _ = program.write_text(f'{text}exec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    return str(program)


def main(chip: str, deviation: str, *arguments: str) -> None:
    """`arguments`: -P, -m, the runner's module, its own."""
    from exo_node.shard.model import loader_import  # noqa: F401  # pyright: ignore

    sys.path.append(str(Path(__file__).parent))
    from chips import CHIPS, replace_kernels

    replace_kernels(CHIPS[chip], float(deviation))
    sys.argv = [RUNNER, *arguments[3:]]
    runpy.run_module(RUNNER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
