"""`exo-node models search`, `pull`, `rm`, `load` and `unload`."""

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from ...placement.errors import ExoNodeError, PlacementNotFound
from ...placement.reasons import first_clause
from . import flags
from .client import call, connect, delete
from .load import answering_text, drafter_name, parse_count, placement_body
from .load import load as load_model
from .models import ModelId, entries_of_node, fit_text, models, this_machine
from .output import (
    StatusLine,
    caches_text,
    confirm,
    duration,
    note,
    print_json,
    print_result,
    print_table,
    size,
    text_of,
)
from .times import TIMES

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..store.transfers import Progress

_Revision = Annotated[
    str | None, flags.option("REVISION", "A branch, tag or commit; default: the main branch.")
]
_Quant = Annotated[
    int | None,
    flags.option("BITS", "The published quantisation of so many bits instead.", min=2, max=8),
]
_Replicas = Annotated[
    str | None,
    flags.option(
        "N|auto",
        "Copies, each on nodes of its own; auto: as many as answers need.",
        callback=parse_count,
    ),
]
_LoadedModel = Annotated[
    str, flags.argument("MODEL", "The id of a loaded model, or of its placement.")
]


@models.command()
def pull(
    id: ModelId,
    revision: _Revision = None,
    quant: _Quant = None,
    data_dir: flags.DataDir = None,
    as_json: flags.AsJson = False,
) -> None:
    """Download a model into the Hugging Face cache.

    It continues where an earlier download stopped. No node has to run; one that does sees the model
    at once.
    """
    from ..store.hub_download import download

    settings, library, _ = this_machine(data_dir, None)
    repository, pinned = library.repository(id, quant)
    with ProgressLine(repository) as show:
        folder = download(repository, revision or pinned, show, offline=settings.offline)
    name = f"{repository}@{revision}" if revision and revision != "main" else repository
    if as_json:
        print_json({"id": name, "folder": str(folder)})
        return
    note(f"{name} is here; with a node running (`exo-node start`),")
    note(f"`exo-node chat --model {name} PROMPT` asks it")


@models.command()
def search(
    words: Annotated[list[str], flags.argument("WORDS", "Of models' names.")],
    port: flags.LocalPort = None,
    data_dir: flags.DataDir = None,
    as_json: flags.AsJson = False,
) -> None:
    """Search Hugging Face for models, by a running node."""
    path = f"/v1/models/search?q={quote(' '.join(words), safe='')}"
    hits = call(connect(port, data_dir), path, timeout_s=TIMES.search_s).get("data", [])
    if as_json:
        print_json(hits)
        return
    if not hits:
        note("the hub has no safetensors models by that name")
        return
    rows = [
        (
            text_of(hit.get("id")),
            size(hit.get("size_bytes")),
            f"cannot be used: {hit['error']}" if hit.get("error") else fit_text(hit),
        )
        for hit in hits
    ]
    print_table(("MODEL", "SIZE", "FITS"), rows)
    note(f"`exo-node models pull {text_of(hits[0].get('id'))}` gets the first")


@models.command()
def rm(
    id: ModelId,
    yes: flags.Yes = False,
    models_dir: flags.ModelsDir = None,
    port: flags.LocalPort = None,
    data_dir: flags.DataDir = None,
    as_json: flags.AsJson = False,
) -> None:
    """Delete a model from this machine's disk."""
    settings, library, _ = this_machine(data_dir, models_dir)
    for entry in entries_of_node(port, data_dir) or ():
        if entry.get("id") == id and entry.get("loaded"):
            raise ExoNodeError(f"{id} is loaded; `exo-node models unload {id}` unloads it")
    removal = library.removal(id, settings.data_dir / "models")
    if not yes:
        refusal = f"--yes: say that {id} may be deleted"
        confirm(f"Delete {id} from this machine's disk?", refusal)
    removal.carry_out()
    result = {"id": id, "deleted": True, "freed_bytes": removal.freed_bytes}
    text = f"{id} is deleted; {size(removal.freed_bytes)} are free again"
    print_result(result, text, as_json=as_json)


@models.command()
def load(
    model: flags.Model,
    min_nodes: flags.MinNodes = None,
    max_nodes: flags.MaxNodes = None,
    context: flags.Context = None,
    kv_bits: flags.KvBits = None,
    drafter: flags.Drafter = None,
    nodes: flags.Nodes = None,
    layers: flags.Layers = None,
    exclude: flags.Exclude = None,
    replicas: _Replicas = None,
    port: flags.LocalPort = None,
    data_dir: flags.DataDir = None,
    as_json: flags.AsJson = False,
) -> None:
    """Load a model, with the options of a plan.

    It runs where `exo-node plan` with the same options would place it. One that is loaded with
    other options is loaded again. A chat loads its model by itself.
    """
    if replicas is not None:  # with a number of copies alone, an earlier load's options would hold
        min_nodes = min_nodes or 1
    options = {"min_nodes": min_nodes, "max_nodes": max_nodes, "context": context}
    options |= {"kv_bits": kv_bits, "nodes": nodes, "layers": layers, "exclude": exclude}
    options |= {"replicas": replicas, "drafter": drafter_name(drafter)}
    endpoint = connect(port, data_dir)
    placement = load_model(endpoint, placement_body(model, options))
    if as_json:
        print_json(placement)
        return
    context_text = f"{text_of(placement.get('context_length'))} tokens of context"
    reason = first_clause(text_of(placement.get("reason")))
    note(f"{model} is loaded, with {context_text}{caches_text(placement)}: {reason}")
    if replicas is not None:
        note(f"{model}: {answering_text(endpoint, placement)}")


@models.command()
def unload(
    model: _LoadedModel,
    port: flags.LocalPort = None,
    data_dir: flags.DataDir = None,
    as_json: flags.AsJson = False,
) -> None:
    """Take a model out of memory, once its answers have ended. Its files stay."""
    endpoint = connect(port, data_dir)
    placements: list[dict[str, Any]] = call(endpoint, "/v1/placements").get("data", [])
    ids = [str(p["id"]) for p in placements if model in (p.get("model"), p.get("id"))]
    if not ids:
        names = ", ".join(sorted(str(each.get("model")) for each in placements)) or "no model is"
        raise PlacementNotFound(f"{model} is not loaded; {names} now", param="MODEL")
    for id in ids:
        delete(endpoint, f"/v1/placements/{quote(id, safe='')}")
    print_result({"model": model, "unloaded": ids}, f"{model} is unloaded", as_json=as_json)


class ProgressLine:
    """A download's progress: one line, overwritten, on a terminal, else a line now and then."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._terminal = sys.stderr.isatty()
        self._line = StatusLine()
        self._first: tuple[float, int] | None = None
        self._printed_at = 0.0

    def show(self, news: "Progress") -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = (now, news.done_bytes)
        every = TIMES.drawn_every_s if self._terminal else TIMES.line_every_s
        if now - self._printed_at < every and news.done_bytes < news.total_bytes:
            return
        self._printed_at = now
        text = self._text(news, now)
        self._line.show(text) if self._terminal else note(text)

    def __enter__(self) -> "Callable[[Progress], None]":
        return self.show

    def __exit__(self, *_: object) -> None:
        self._line.end()

    def _text(self, news: "Progress", now: float) -> str:
        began, before = self._first or (now, 0)
        percent = 100 * news.done_bytes // max(news.total_bytes, 1)
        text = f"{self._name}: {news.done_bytes / 1e9:,.2f} of {news.total_bytes / 1e9:,.2f} GB"
        text += f" ({percent} %)"
        rate = (news.done_bytes - before) / (now - began) if now > began else 0.0
        if rate > 0 and news.done_bytes < news.total_bytes:
            remaining_s = (news.total_bytes - news.done_bytes) / rate
            text += f", {rate / 1e6:,.1f} MB/s, {duration(remaining_s)} left"
        return text
