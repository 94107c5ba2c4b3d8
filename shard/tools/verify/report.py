"""The report of `exo-node verify` as text, and as JSON that users can send to us; free of MLX.

It contains no names of machines, persons, folders or prompts.
"""

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from ....placement.errors import InvalidCheckpoint

if TYPE_CHECKING:
    from ...kernels.trial import KernelChoice

SCHEMA: Final = 2
WIDTH: Final = 96

Finding = Literal["ok", "differs", "defect", "skipped"]
"""`differs`: within rounding. `defect`: by more, or where no difference is allowed."""

Verdict = Literal["exact", "near_tie", "defect"]

_SENTENCES: Final[Mapping[Verdict, str]] = {
    "exact": "Exact: on this machine drafts change no answer, bit for bit.",
    "near_tie": (
        "Exact but for near ties: this machine's kernels round differently for blocks than for "
        "single rows, so a greedy answer may take the other of two about equally likely tokens. "
        "EXO_NATIVE_MTP_ENABLED=0, or num_draft_tokens 0 in a request, decodes without drafts."
    ),
    "defect": (
        "A defect: answers are not what they must be. Please send us the report (`--json FILE`), "
        "and use EXO_NATIVE_MTP_ENABLED=0 until it is mended."
    ),
}


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check, and its figures as JSON values."""

    name: str
    finding: Finding
    summary: str
    numbers: Mapping[str, Any]

    def named(self, addition: str) -> "Check":
        """The check under its name and `addition`."""
        return replace(self, name=self.name + addition)


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run; the mappings hold JSON values."""

    created: str
    versions: Mapping[str, Any]
    device: Mapping[str, Any]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    checks: tuple[Check, ...]
    seconds: float
    kernels: "tuple[KernelChoice, ...]" = ()
    """The kernels of the layers and why: which rows and keys of a part agree, or what it costs."""

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.checks)

    @property
    def exit_status(self) -> int:
        """0 if answers are exact, near ties included."""
        return 1 if self.verdict == "defect" else 0


def verdict_of(checks: Iterable[Check]) -> Verdict:
    findings = {check.finding for check in checks}
    if "defect" in findings:
        return "defect"
    return "near_tie" if "differs" in findings else "exact"


def as_json(report: Report) -> str:
    fields = {"schema": SCHEMA, "kind": "exo-node verify", "verdict": report.verdict}
    return json.dumps(fields | asdict(report), indent=2, allow_nan=False) + "\n"


def as_text(report: Report) -> str:
    model, device = report.model, report.device
    bits = f", {model['quantization']} bits" if model["quantization"] else ""
    if model["kv_bits"]:
        bits += f", caches of {model['kv_bits']} bits on both sides of each comparison"
    memory = device["memory_bytes"] / 1e9
    lines = [
        f"{model['id']} ({model['dtype']}{bits}) on {device['chip']}, {device['backend']}, "
        f"{memory:.0f} GB, MLX {report.versions['mlx']}",
        "",
        *_table((check.finding, check.name, check.summary) for check in report.checks),
        "",
    ]
    kernels = [
        (each.shape, str(each.layers), each.kernel if each.used else "MLX", each.reason)
        for each in report.kernels
    ]
    if kernels:
        lines += [*_table([("part", "layers", "computed by", "because"), *kernels]), ""]
    lines += [*textwrap.wrap(_sentence(report), WIDTH), f"({report.seconds:.1f} s)"]
    return "\n".join(lines)


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(*map(Text, row))
    console = Console(width=WIDTH, height=1, color_system=None)
    with console.capture() as captured:
        console.print(grid)
    return [line.rstrip() for line in captured.get().rstrip("\n").split("\n")]


def _sentence(report: Report) -> str:
    if report.model["head"] != "loaded" and report.verdict != "defect":
        return "This model drafts nothing here, so nothing can change its answers."
    return _SENTENCES[report.verdict]


def finite(value: float, name: str) -> float:
    """Returns `value`. Raises InvalidCheckpoint if it is not finite, as after an overflow."""
    if value != value or value in (float("inf"), float("-inf")):
        raise InvalidCheckpoint(
            f"{name} is {value}: the model computes no finite numbers in this dtype; try another "
            "--dtype, or download it again"
        )
    return value
