"""`exo-node plan`: where the cluster would place a model, and why; nothing is loaded."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from ...placement.cluster import layer_range
from .output import size


def query(model: str, options: Mapping[str, object]) -> str:
    """The path that asks for it; options that are None are left out."""
    given = {name: value for name, value in options.items() if value is not None}
    return "/v1/placements/preview?" + urlencode({"model": model, **given})


def told(preview: Mapping[str, Any]) -> str:
    """The preview's JSON for a terminal."""
    best, runner_up = preview["best"], preview["runner_up"]
    bound = f"{preview['bound_s'] * 1000:.3g} ms a token"
    if preview["proven"]:
        bound = "nothing else is faster by these figures"
    else:
        bound = f"nothing can take less than {bound}"
    lines = [
        _placement("best", best),
        *_stages(best),
        f"  {best['context_length']} tokens of context",
        _placement("runner-up", runner_up) if runner_up else "runner-up: none",
        *(_stages(runner_up) if runner_up else ()),
        f"bound: {bound} (sets of nodes weighed: {preview['candidates_considered']})",
        f"why: {best['reason']}",
        f"drafting: {preview['drafting']}",
    ]
    return "\n".join(lines)


def _placement(what: str, placement: Mapping[str, Any]) -> str:
    return f"{what}: {placement['seconds_per_token'] * 1000:.3g} ms a token"


def _stages(placement: Mapping[str, Any]) -> list[str]:
    return [
        f"  {stage['name']}: {layer_range(*stage['layers'])}, "
        f"{size(stage['memory_bytes'])} of {size(stage['memory_left_bytes'])} of memory"
        for stage in placement["stages"]
    ]
