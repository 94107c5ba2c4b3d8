"""MLX compiles a model's functions beside its answers, which have the same ids before and after."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from broken_compiler import BROKEN, needs_gxx
from nodes import python_path

from exo_node.shard.model import fusing

pytestmark = needs_gxx

BESIDE = """
import json, logging, os, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO, force=True)
from exo_node.shard.kernels.fused_code import COMPILING, VERSION
from exo_node.shard.model import fusing
from exo_node.shard.model.load import load
import mlx.core as mx
from engines import answer, engine_of, request, spec

code = Path(os.environ["TMPDIR"], "mlx", VERSION, "cpu")
code.mkdir(parents=True)
libraries = lambda: len(list(code.glob("*.so")))
wrong = sys.argv[1]
if wrong == "bits":
    fusing._same_bits = lambda one, _: mx.array(False)
stage = spec()
loaded = load(stage, lambda _: None, fuses=False)
engine = engine_of(loaded, stage)
if wrong == "alone":
    def refuses(*_, **__):
        raise TypeError("a layer needs those before it")
    loaded.model.hidden = refuses
ask = lambda: list(answer(engine, request([5, 6, 7, 8, 9], 0, 12)).ids)
first, before, beside = ask(), libraries(), []
one = fusing.LaterFusing(loaded.model, loaded.expected, "key", outer=True)
held = COMPILING.locked()
while not one.has_ended:
    one.step()
    compiled = libraries()
    beside += ask()
after = ask()
again = fusing.LaterFusing(loaded.model, loaded.expected, "key", outer=True)
if not again.has_ended:
    COMPILING.release()
print(json.dumps({
    "before": before, "held": held, "freed": not COMPILING.locked(), "compiled": compiled,
    "same": beside == first * (len(beside) // len(first)) and after == first,
    "at once": again.has_ended, "late": libraries() - compiled, "priority": os.nice(0),
    "other": fusing.LaterFusing(loaded.model, loaded.expected, "other", outer=True).has_ended,
}))
"""
TESTS = Path(__file__).parents[2]


def beside(tmp_path: Path, wrong: str = "", path: str = "") -> tuple[dict[str, int], str]:
    """What a process finds that answers while MLX compiles, and its log."""
    paths = {"TMPDIR": str(tmp_path), "PYTHONPATH": python_path(TESTS)}
    environment = {**os.environ, **paths}
    if path:
        environment["PATH"] = path
    process = subprocess.run(
        [sys.executable, "-c", BESIDE, wrong], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout), process.stderr


@pytest.mark.smoke
def test_answers_wait_for_no_compiler_and_have_their_ids_before_and_after(tmp_path: Path) -> None:
    path, niceness = os.environ["PATH"], tmp_path / "niceness"
    wrapper = tmp_path / "g++"
    _ = wrapper.write_text(
        f'#!/bin/sh\n[ $1 = --version ] || nice >>{niceness}\nPATH="{path}" exec g++ "$@"\n'
    )
    wrapper.chmod(0o755)
    found, log = beside(tmp_path, path=f"{tmp_path}:{path}")
    assert found["before"] == 0, "the first answer is there before anything is compiled"
    assert found["same"] and found["compiled"] >= 8
    assert found["late"] == 0, "answers use nothing but what was compiled beside them"
    assert found["held"] and found["freed"], "nothing is measured or saved meanwhile"
    assert found["at once"] and not found["other"], "what was compiled is fused at once"
    mine = os.nice(0)
    assert found["priority"] == mine, "only the compilers step back"
    assert set(niceness.read_text().split()) == {str(min(mine + fusing.STEP_BACK, 19))}
    assert "compiled and fused, after" in log


@pytest.mark.parametrize("wrong", ["bits", "compiler"])
def test_what_cannot_be_fused_with_the_same_bits_is_not_and_the_log_says_why(
    tmp_path: Path, wrong: str
) -> None:
    broken, cache = tmp_path / "bin", tmp_path / "cache"
    broken.mkdir()
    cache.mkdir()
    (broken / "g++").write_text(BROKEN)
    (broken / "g++").chmod(0o755)
    for name in ("sh", "gcc", "as", "ld"):
        (broken / name).symlink_to(str(shutil.which(name)))
    found, log = beside(cache, wrong, str(broken) if wrong == "compiler" else "")
    assert found["same"] and found["freed"] and not found["at once"]
    why = {
        "bits": fusing.OTHER_BITS,
        "compiler": "redeclaration of C++ built-in type '_Float32'",
    }
    assert why[wrong] in log and "operations are not fused" in log
    assert "compiled and fused" not in log


def test_a_model_whose_layers_do_not_run_alone_is_compiled_as_answers_need_it(
    tmp_path: Path,
) -> None:
    found, log = beside(tmp_path, "alone")
    assert "layers do not run alone: TypeError: a layer needs those before it" in log
    assert found["same"] and found["freed"] and not found["at once"]
    assert found["compiled"] <= 1 and found["late"] >= 8, "they are fused"
