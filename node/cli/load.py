"""A model's place: `exo-node plan`, and a load with its progress."""

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import typer

from ...placement.cluster import layer_range
from ...placement.options import parse_split
from . import flags
from .client import ApiEndpoint, call, connect
from .failures import CommandFailed
from .output import Json, StatusLine, caches_text, duration, joined, note, print_json, size, text_of
from .times import TIMES

_PLACEMENTS: Final = "/v1/placements"


def parse_count(text: str | None) -> int | str | None:
    """A number of copies, or `auto`."""
    if text in (None, "auto"):
        return text
    if text.isascii() and text.isdecimal() and 1 <= int(text) <= 8:
        return int(text)
    raise typer.BadParameter(f"{text!r} is no number from 1 to 8, nor auto")


def drafter_name(text: str | None) -> str | None:
    """A drafter by id, or by the whole path of its folder: the node has another one's relative."""
    is_path = text is not None and text.startswith(("/", ".", "~"))
    return str(Path(text).expanduser().absolute()) if text and is_path else text


def answering_text(endpoint: ApiEndpoint, placement: Json) -> str:
    """How many copies answer, of how many that should, and why not all. Raises CommandFailed."""
    placements: list[Json] = call(endpoint, _PLACEMENTS).get("data", [])
    copies = [each for each in placements if each.get("model") == placement.get("model")]
    ready = sum(each.get("status") == "ready" for each in copies)
    desired = int(placement.get("replicas", 1))
    current = next((each for each in copies if "replicas_missing" in each), placement)
    missing = current.get("replicas_missing") if ready < desired else ""
    return f"{ready} of {desired} answer now" + (f"; {missing}" if missing else "")


def held_options_text(placement: Json) -> str:
    """The options that an earlier load gave and that hold, with the remedy; "" without any."""
    if not (options := placement.get("asked_for")):
        return ""
    command = f"exo-node models load {text_of(placement.get('model'))}"
    if (replicas := placement.get("replicas", 1)) > 1 or placement.get("auto_replicas"):
        command += f" --replicas {'auto' if placement.get('auto_replicas') else replicas}"
    return f"placed as was asked for ({options}); `{command}` drops that"


# ---------------------------------------------------------------------------- a plan


def plan(
    model: flags.Model,
    min_nodes: flags.MinNodes = None,
    max_nodes: flags.MaxNodes = None,
    context: flags.Context = None,
    kv_bits: flags.KvBits = None,
    drafter: flags.Drafter = None,
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
    options |= {"drafter": drafter_name(drafter)}
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
    if reading := preview.get("read_reason"):
        lines.append(f"long prompts: {reading}")
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


# ---------------------------------------------------------------------------- a load


def placement_body(model: str, options: Mapping[str, object]) -> dict[str, Any]:
    """The body that loads a model by the flags of a plan; those that are None are left out.

    Raises InvalidRequest for `layers`.
    """
    body: dict[str, Any] = {"model": model}
    for name, value in options.items():
        match name, value:
            case _, None:
                pass
            case "layers", str(text):
                body[name] = parse_split(text)
            case (("nodes" | "exclude"), str(text)):
                body[name] = text.split(",")
            case _:
                body[name] = value
    return body


def load(endpoint: ApiEndpoint, body: Json) -> dict[str, Any]:
    """Loads `model` of a body with options, and shows the progress on a terminal.

    Returns the placement. No time limit. Raises CommandFailed.
    """
    model = str(body["model"])
    try:
        with _progress(endpoint, model):
            return call(endpoint, _PLACEMENTS, body, timeout_s=None)
    except KeyboardInterrupt:
        note(f"the node still loads {model}; `exo-node models unload {model}` ends that")
        raise


@contextmanager
def _progress(endpoint: ApiEndpoint, model: str) -> Generator[None]:
    """Shows the step of the model's load on a terminal, one line, until the block ends."""
    ended, line = threading.Event(), StatusLine()

    def watch() -> None:
        while not ended.wait(TIMES.load_look_s):
            with suppress(CommandFailed):  # the load itself reports what is wrong
                for placement in call(endpoint, _PLACEMENTS).get("data", []):
                    if placement.get("model") == model and placement.get("progress"):
                        line.show(f"{model}: {placement['progress']}")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        line.clear()
