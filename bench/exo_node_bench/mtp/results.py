"""The results of a sweep, as JSON and as rows of a CSV file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..spread import Spread
from .report import ArmSummary, CategorySummary, StepCosts, TimedRun

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """One prompt that ran."""

    name: str
    category: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Results:
    """Results of one sweep.

    `no_drafts`: the reason why only K=0 ran, else ""; `skipped`: prompts with reasons.
    """

    created: str
    model: Mapping[str, Any]
    device: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    greedy_identity: str
    no_drafts: str
    skipped: tuple[str, ...]
    costs: StepCosts | None
    arms: tuple[ArmSummary, ...]
    categories: tuple[CategorySummary, ...]
    prompts: tuple[PromptFacts, ...]
    runs: tuple[TimedRun, ...]

    @property
    def title(self) -> str:
        """Model, dtype and settings."""
        s = self.settings
        how = "greedy" if s["temperature"] == 0 else f"temperature {s['temperature']:g}"
        return (
            f"{self.model['id']}, {self.model['dtype']}, {how}, {len(self.prompts)} prompts, "
            f"at most {s['max_tokens']} tokens, {s['repeats']} repeats"
        )

    @property
    def where(self) -> str:
        """Device and versions."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        backend = self.device["backend"]
        if backend == "cpu":
            backend = f"cpu, {self.device['cores']} cores"
        return f"{self.device['chip']} ({backend}), {versions}"


def as_json(results: Results) -> str:
    """All results as JSON, raw runs included; in seconds, tokens, shares and ratios."""
    body = {"kind": "exo-node bench mtp", "schema": SCHEMA, **asdict(results)}
    return json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_rows(results: Results) -> list[dict[str, object]]:
    """One row for each arm; a spread has the columns name, name_least and name_most."""
    return [_flat(arm, results) for arm in results.arms]


_SPREADS = ("tok_s", "mean_tok_s", "vs_off", "vs_mlx_lm", "ttft_s", "ttft_vs_off")


def _flat(arm: ArmSummary, results: Results) -> dict[str, object]:
    device = results.device["chip"]
    row: dict[str, object] = {"model": results.model["id"], "device": device}
    for field in fields(arm):
        value: object = getattr(arm, field.name)
        if field.name in _SPREADS:
            row |= _spread_columns(field.name, getattr(arm, field.name))
        elif isinstance(value, tuple):
            row[field.name] = " ".join(
                f"{each:.6g}" if isinstance(each, float) else str(each) for each in value
            )
        else:
            row[field.name] = f"{value:.6g}" if isinstance(value, float) else value
    return row


def _spread_columns(name: str, spread: Spread | None) -> dict[str, object]:
    if spread is None:
        return {name: None, f"{name}_least": None, f"{name}_most": None}
    return {
        name: f"{spread.median:.6g}",
        f"{name}_least": f"{spread.least:.6g}",
        f"{name}_most": f"{spread.most:.6g}",
    }
