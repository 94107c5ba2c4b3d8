"""`exo-node plan`: where the cluster would place a model, and why; nothing is loaded."""

from collections.abc import Mapping
from urllib.parse import urlencode

from ...placement.cluster import layer_range
from . import flags
from .client import call, connect
from .output import Json, caches_text, duration, joined, print_json, size


def plan(
    model: flags.Model,
    min_nodes: flags.MinNodes = None,
    max_nodes: flags.MaxNodes = None,
    context: flags.Context = None,
    kv_bits: flags.KvBits = None,
    nodes: flags.Nodes = None,
    layers: flags.Layers = None,
    exclude: flags.Exclude = None,
    port: flags.LocalPort = None,
    data_dir: flags.DataDir = None,
    as_json: flags.AsJson = False,
) -> None:
    """Show where a model would be placed, and why.

    The next best placement is shown as well; nothing is loaded.
    """
    options = {"min_nodes": min_nodes, "max_nodes": max_nodes, "context": context}
    options |= {"kv_bits": kv_bits, "nodes": nodes, "layers": layers, "exclude": exclude}
    preview = call(connect(port, data_dir), preview_path(model, options))
    print_json(preview) if as_json else print(preview_text(preview))


def preview_path(model: str, options: Mapping[str, object]) -> str:
    """The path of the preview; options that are None are left out."""
    query = {name: value for name, value in options.items() if value is not None}
    return "/v1/placements/preview?" + urlencode({"model": model, **query})


def preview_text(preview: Json) -> str:
    best, runner_up = preview["best"], preview["runner_up"]
    bound = f"none can take less than {preview['bound_s'] * 1000:.3g} ms a token"
    if preview["proven"]:
        bound = "none is faster than the best by these figures"
    weighed = preview["candidates_considered"]
    lines = [
        *_placement_lines("best", best),
        f"  {best['context_length']} tokens of context, in {best['dtype']}" + caches_text(best),
        *(_placement_lines("runner-up", runner_up) if runner_up else ["runner-up: none"]),
        f"compared: {weighed} choice{'s'[weighed == 1 :]} of nodes; {bound}",
        f"why: {best['reason']}",
        f"drafting: {preview['drafting']}",
    ]
    if refusal := preview.get("refusal"):
        lines.append(f"not loaded as it is: {refusal}")
    return joined(lines)


def _placement_lines(name: str, placement: Json) -> list[str]:
    """Speed, then the stages, then the files that nodes lack."""
    stages = [
        f"  {stage['name']}: {layer_range(*stage['layers'])}, "
        f"{size(stage['memory_bytes'])} of {size(stage['memory_left_bytes'])} of memory"
        for stage in placement["stages"]
    ]
    transfers = [f"  {_transfer(each)}" for each in placement.get("to_bring", ())]
    seconds = placement["seconds_per_token"]
    speed = f"about {round(1 / seconds, 1):g} tokens a second, {seconds * 1000:.3g} ms each"
    return [f"{name}: {speed}", *stages, *transfers]


def _transfer(transfer: Json) -> str:
    """The files that one node has to copy or download."""
    nbytes, source, seconds = transfer["bytes"], transfer["from"], transfer["seconds"]
    if source is None:
        return f"{transfer['name']} downloads {size(nbytes)}"
    about = "" if seconds is None else f", about {duration(seconds)}"
    return f"{transfer['name']} copies up to {size(nbytes)} from {source}{about}"
