"""Tests which of mlx-lm's model classes run: on one node, as two stages at every border, drafting.

    python bench/families.py [CLASS ...] [--json FILE]
    python bench/families.py --docs       rewrite the tables in docs/models.md and
                                          results/families.md from the last run

Each is a tiny model of random weights (`tests/zoo.py`). The ids must be those of `generate_step`,
in chunks of two sizes; a border is good if both stages pass their check
(`shard/model/split_check.py`) and the two stages over frames give the whole model's ids. Classes
that mlx-lm itself cannot run on this machine are listed with its reason.
A class runs in a process of its own: some abort.
"""

import argparse
import json
import multiprocessing
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))

CHUNKS = (8, 256)
LIMIT_S = 300
RESULTS = Path(__file__).parent / "results" / "families.json"
CLASSES = RESULTS.with_suffix(".md")
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- families -->", "<!-- end of families -->"
FAMILIES = {
    "Qwen3.5, 3.6, 3.8": ("qwen3_5", "qwen3_5_moe"),
    "Qwen3-Next": ("qwen3_next",),
    "Qwen3": ("qwen3", "qwen3_moe"),
    "Qwen3-VL": ("qwen3_vl", "qwen3_vl_moe"),
    "Llama": ("llama", "llama4"),
    "Gemma": ("gemma3", "gemma3_text", "gemma4", "gemma4_text", "gemma3n"),
    "gpt-oss": ("gpt_oss",),
    "GLM": ("glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    "DeepSeek": ("deepseek_v3", "deepseek_v32"),
    "Mistral": ("mistral3", "ministral3"),
    "MiniMax": ("minimax",),
    "Kimi": ("kimi_k25", "kimi_linear"),
}
"""The families in docs/models.md; `results/families.md` has every class."""
CAN_DRAFT, NO_HEAD = "can draft", "no draft head is implemented for it"
PAGE_OF_CLASSES = """# Model classes

`make bench-families`: {versions}. Each class of mlx-lm as a tiny model of random weights with six \
layers. One node: its ids against those of `generate_step`, with prompts in chunks of 8 and of 256 \
rows. Two stages: their ids against the whole model's, split behind layer 1, 2, 3, 4 and 5.

## The same ids on one node, and as two stages wherever they are split

| caches | with native MTP | without |
|---|---|---|
{alike}

## Others

| class | caches | one node, 8 / 256 | two stages, split at | why not elsewhere | native MTP |
|---|---|---|---|---|---|
{others}

## Not run by mlx-lm on this machine

| class | its error |
|---|---|
{refused}
"""


@dataclass(frozen=True)
class Row:
    """The results of one class."""

    name: str
    caches: str = ""
    one_node: str = ""
    """"same" as `generate_step`, or the difference, for each chunk size."""
    borders: str = ""
    """The borders at which two stages give the whole model's ids, of how many."""
    why_not: str = ""
    """The reason at the first refused border."""
    drafts: str = ""
    mlx_lm: str = ""
    """The reason why mlx-lm does not run it here."""


def examine(name: str) -> Row:
    from zoo import tiny_config
    from zoo_runs import mlx_lms, on_one_node, small

    from exo_node.mtp.families.table import family_of
    from exo_node.shard.model.open_model import MODEL_FAULTS

    try:
        config = tiny_config(name)
        expected = mlx_lms(small(config, stock=True))
    except (*MODEL_FAULTS, AssertionError, MemoryError, SystemExit) as fault:
        return Row(name, mlx_lm=f"{type(fault).__name__}: {_line(fault)}")
    model = small(config)
    ids = [on_one_node(model, chunk) for chunk in CHUNKS]
    return Row(
        name,
        _caches(model),
        " / ".join(
            "same" if each == expected else f"differs: {each} for {expected}" for each in ids
        ),
        *_borders(model, config, ids[0]),
        CAN_DRAFT if family_of(model) else NO_HEAD,
    )


def _borders(model: Any, config: dict[str, Any], expected: Sequence[int]) -> tuple[str, str]:
    from zoo_runs import as_two_stages

    from exo_node.placement.errors import LoadFailed
    from exo_node.shard.model.split_check import require_splittable

    layers = len(model.layers)
    good: list[int] = []
    why_not = ""
    for at in range(1, layers):
        try:
            require_splittable(config, 0, at, "")
            require_splittable(config, at, layers, "")
        except LoadFailed as fault:
            why_not = why_not or f"at {at}: {_line(fault)}"
            continue
        if as_two_stages(model, config, at) == expected:
            good.append(at)
        else:
            why_not = why_not or f"at {at}: passed its check, and its ids differ"
    return f"{', '.join(map(str, good)) or 'none'} of {layers - 1}", why_not


def _caches(model: Any) -> str:
    from mlx_lm.models.cache import make_prompt_cache

    caches = cast("list[object]", make_prompt_cache(model))
    return ", ".join(sorted({type(cache).__name__ for cache in caches}))


def _line(fault: BaseException) -> str:
    return (str(fault).splitlines() or [""])[0]


def _child(name: str, sender: Any) -> None:
    sender.send(examine(name))


def alone(name: str) -> Row:
    """Examines a class in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(name, sender))
    child.start()
    sender.close()
    try:
        row = receiver.recv() if receiver.poll(LIMIT_S) else Row(name, mlx_lm="no end in time")
    except EOFError:
        child.join()
        row = Row(name, mlx_lm=f"its process ended with {child.exitcode}")
    if child.is_alive():
        child.terminate()
    child.join()
    return row


def markdown(report: Mapping[str, Any]) -> str:
    """`results/families.md`: classes that run alike as lists, all others as rows."""
    rows = [Row(**row) for row in report["rows"]]
    ran = [row for row in rows if not row.mlx_lm]
    lists: dict[str, dict[str, list[str]]] = {}
    others: list[str] = []
    for row in ran:
        if _ids_same(row) and _splits_everywhere(row):
            lists.setdefault(row.caches, {}).setdefault(row.drafts, []).append(row.name)
        else:
            reason = re.search(r"^(at \d+: ).*?\((.*)\)", row.why_not)
            why_not = "".join(reason.groups()) if reason else row.why_not
            cells = (row.name, row.caches, row.one_node, row.borders, why_not, _drafts(row))
            others.append(f"| {' | '.join(cells)} |")
    alike = [
        f"| {caches} | {', '.join(by_drafts.get(CAN_DRAFT, []))} "
        f"| {', '.join(by_drafts.get(NO_HEAD, []))} |"
        for caches, by_drafts in sorted(lists.items())
    ]
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    refused = [f"| {row.name} | {row.mlx_lm} |" for row in rows if row.mlx_lm]
    return PAGE_OF_CLASSES.format(
        versions=versions,
        alike="\n".join(alike),
        others="\n".join(others),
        refused="\n".join(refused),
    )


def _ids_same(row: Row) -> bool:
    return set(row.one_node.split(" / ")) == {"same"}


def _drafts(row: Row) -> str:
    return "yes" if row.drafts == CAN_DRAFT else "no"


def _splits_everywhere(row: Row) -> bool:
    good, _, borders = row.borders.partition(" of ")
    return good != "none" and good.count(",") + 1 == int(borders)


def families(rows: Sequence[Mapping[str, str]]) -> str:
    """The table in docs/models.md: one row for each family of `FAMILIES`, by its worst class."""
    rows_by_name = {row["name"]: row for row in rows}
    lines = [
        "| family | class in mlx-lm | one node | two nodes | native MTP |",
        "|---|---|---|---|---|",
    ]
    for family, classes in FAMILIES.items():
        for name in classes:
            row = Row(**rows_by_name[name])
            cells = [
                "same" if _ids_same(row) else row.one_node,
                "same" if _splits_everywhere(row) else f"at {row.borders}",
                _drafts(row),
            ]
            lines.append(f"| {family} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def documented(page: str, rows: Sequence[Mapping[str, str]]) -> str:
    """The page with its table replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{families(rows)}\n{END}{after}"


def main() -> None:
    from zoo import classes

    parser = argparse.ArgumentParser(description=__doc__)
    _ = parser.add_argument("classes", nargs="*")
    _ = parser.add_argument("--json", type=Path)
    _ = parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    if options.docs:
        report = json.loads(RESULTS.read_text())
        _ = PAGE.write_text(documented(PAGE.read_text(), report["rows"]))
        _ = CLASSES.write_text(markdown(report))
        return
    rows: list[Row] = []
    for name in options.classes or classes():
        rows.append(alone(name))
        row = rows[-1]
        result = f"{row.one_node}; {row.borders} {row.why_not}"
        print(f"{name}: {row.mlx_lm or result}", flush=True)
    if options.json is not None:
        versions = {name: version(name) for name in ("mlx", "mlx-lm", "exo-node")}
        machine = {"machine": platform.machine(), "system": platform.system()}
        report = {
            "versions": machine | versions | {"date": date.today().isoformat()},
            "rows": [asdict(row) for row in rows],
        }
        _ = options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
