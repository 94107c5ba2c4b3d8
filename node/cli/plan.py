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
        *_to_bring(best),
        f"  {best['context_length']} tokens of context, in {best['dtype']}",
        _placement("runner-up", runner_up) if runner_up else "runner-up: none",
        *(_stages(runner_up) if runner_up else ()),
        *(_to_bring(runner_up) if runner_up else ()),
        f"bound: {bound} (sets of nodes weighed: {preview['candidates_considered']})",
        f"why: {best['reason']}",
        f"drafting: {preview['drafting']}",
    ]
    if refusal := preview.get("refusal"):
        lines.append(f"not loaded as it is: {refusal}")
    return "\n".join(lines)


def _placement(what: str, placement: Mapping[str, Any]) -> str:
    return f"{what}: {placement['seconds_per_token'] * 1000:.3g} ms a token"


def _stages(placement: Mapping[str, Any]) -> list[str]:
    return [
        f"  {stage['name']}: {layer_range(*stage['layers'])}, "
        f"{size(stage['memory_bytes'])} of {size(stage['memory_left_bytes'])} of memory"
        for stage in placement["stages"]
    ]


def _to_bring(placement: Mapping[str, Any]) -> list[str]:
    return [f"  {bringing(each)}" for each in placement.get("to_bring", ())]


def bringing(each: Mapping[str, Any]) -> str:
    """What one node has to copy or download, for a person."""
    nbytes, source, seconds = each["bytes"], each["from"], each["seconds"]
    if source is None:
        return f"{each['name']} downloads {size(nbytes)}"
    about = "" if seconds is None else f", about {_duration(seconds)}"
    return f"{each['name']} copies up to {size(nbytes)} from {source}{about}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min"
