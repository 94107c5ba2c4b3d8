"""The whole greedy identity matrix: ours against mlx-lm's generate_step, case by case.

    python bench/identity_matrix.py [--output FILE]

Exit status 1 if any case differs. Tiny random checkpoints, made in a temporary folder.
"""

import argparse
import platform
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))

from identity import TOKENS, Case, Subjects, all_cases


def main() -> int:
    parser = argparse.ArgumentParser(description="The greedy identity matrix")
    _ = parser.add_argument("--output", type=Path, help="a file for the table")
    options = parser.parse_args()
    same, total = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    different: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        subjects = Subjects(Path(folder))
        for case in all_cases():
            key = (case.family, case.layout, case.weights)
            subject = subjects.of(case)
            equal = subject.answer(case)[0] == subject.reference(case.length)
            total[key] += 1
            same[key] += equal
            if not equal:
                different.append(case)
                print(f"differs: {case}", file=sys.stderr)
    table = _table(same, total)
    print(table)
    if options.output:
        _ = options.output.write_text(table + "\n")
    return 1 if different else 0


def _table(same: Counter[tuple[str, str, str]], total: Counter[tuple[str, str, str]]) -> str:
    lines = [
        "# Greedy identity with mlx-lm's generate_step",
        "",
        f"`python bench/identity_matrix.py` on {mx.default_device()}, {platform.machine()}, mlx "
        f"{version('mlx')}, mlx-lm {version('mlx-lm')}. Cases of {TOKENS} tokens: K = 0, 1, 2, 3, "
        "5; drafts by the (random) head, always right, never right; prompts of 1, 7, 8, 9 and 17 "
        "rows in chunks of 8.",
        "",
        "| family | layout | weights | cases | same ids |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(key)} | {total[key]} | {same[key]} |" for key in total]
    lines += ["", f"{sum(same.values())} of {sum(total.values())} cases are the same."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
