"""`exo-node models`, `show` and `recommend`: models on the disk, and those that fit."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from . import output
from .client import call, client_settings, find_node
from .flags import AsJson, DataDir, LocalPort, ModelsDir, argument
from .output import Json, joined, size, table, text_of

if TYPE_CHECKING:
    from ...placement.cluster import ClusterView
    from ..machine.settings import Settings
    from ..store.library import ModelLibrary

ModelId = Annotated[str, argument("ID", "A model's id, OWNER/NAME on the hub.")]

_OF_A_NODE: Final = ("loaded", "nodes", "fits", "native_mtp", "prompt_lookup", "mtp")
"""Fields of an entry that a running node knows better than this machine's disk."""

models: Final = typer.Typer(
    help="List the models on disk, and get others.",
    add_completion=False,
    rich_markup_mode=None,
    invoke_without_command=True,
)


@models.callback()
def list_models(
    context: typer.Context,
    models_dir: ModelsDir = None,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List the models on disk, and get others.

    A running node lists those of its cluster; without one this machine's disk is read.
    """
    if context.invoked_subcommand is not None:
        return
    entries = entries_of_node(port, data_dir)
    if entries is None:
        from ..store.listing import on_disk

        _, library, view = this_machine(data_dir, models_dir)
        entries = on_disk(library, view)
    entries = [*entries, *gguf_entries(entries)]
    if as_json:
        output.print_json({"object": "list", "data": entries})
        return
    print(list_text(entries, output.terminal_width()))
    output.note(
        "`exo-node models recommend` names models that fit; `exo-node models pull` gets one"
    )


@models.command()
def show(
    id: ModelId,
    models_dir: ModelsDir = None,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show a model's size, format, fit and native MTP.

    Its files are checked where they are on this disk, without loading them. Exit status 1, with the
    file and the remedy, where they would not load. A running node is asked how fast it is.
    """
    from ..store.listing import describe

    _, library, view = this_machine(data_dir, models_dir)
    entry = describe(library, id, view)
    running = entries_of_node(port, data_dir) or ()
    own_entry = next((each for each in running if each.get("id") == entry["id"]), dict[str, Any]())
    entry |= {name: own_entry[name] for name in _OF_A_NODE if name in own_entry}
    output.print_json(entry) if as_json else print(model_text(entry))


@models.command()
def recommend(port: LocalPort = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Name the models that fit best; those with MTP first.

    They fit the cluster of a running node; without one this machine.
    """
    from ..store.listing import catalogue, recommended

    entries = entries_of_node(port, data_dir, catalog=True)
    if entries is None:
        _, library, view = this_machine(data_dir, None)
        entries = catalogue(library, view)
    best = recommended(entries)
    if as_json:
        output.print_json({"object": "list", "data": best})
    else:
        print(recommendation_text(best, output.terminal_width()))


def entries_of_node(
    port: str | None, data_dir: str | None, *, catalog: bool = False
) -> Sequence[Json] | None:
    """The running node's list of models, or None where no node runs on the data folder.

    `catalog`: of those that exo-node has cards of.
    """
    endpoint = find_node(client_settings(port, data_dir))
    if endpoint is None:
        return None
    return call(endpoint, f"/v1/models{'?catalog=1' * catalog}", timeout_s=60).get("data", [])


def gguf_entries(entries: Sequence[Json]) -> list[dict[str, Any]]:
    """This user's GGUF files that Ollama and LM Studio keep, but for those that were imported."""

    from ..machine.settings import environment
    from ..store.gguf_places import of_other_programs

    ids = {entry.get("id") for entry in entries}
    places = of_other_programs(Path.home(), environment())
    return [each.entry() for each in places if not {each.id, each.import_name} & ids]


def this_machine(
    data_dir: str | None, models_dir: list[str] | None
) -> "tuple[Settings, ModelLibrary, ClusterView]":
    """Settings, models and a cluster of this machine alone, for a command that needs no node.

    Without `models_dir` the folders of a node that runs on the data folder are searched as well.
    Raises InvalidSettings.
    """
    from ..machine import settings
    from ..machine.data_dir_lock import find_running
    from ..machine.hardware import detect_hardware
    from ..placements.local_model import view_of
    from ..store.library import ModelLibrary

    flags = {"data_dir": data_dir, "models_dirs": models_dir or None}
    loaded = settings.load_settings(flags, settings.environment())
    running = None if models_dir else find_running(loaded.data_dir)
    if running is not None and running.models_dirs:
        folders = dict.fromkeys([*loaded.models_dirs, *map(Path, running.models_dirs)])
        loaded = loaded.model_copy(update={"models_dirs": tuple(folders)})
    hardware = detect_hardware(
        settings.installed_distributions(), loaded.memory_limit, settings.visible_gpus()
    )
    library = ModelLibrary(
        settings.models_folders(loaded), offline=loaded.offline, cards=loaded.cards_dir
    )
    return loaded, library, view_of(hardware, loaded)


# ------------------------------------------------- texts, from entries of `GET /v1/models`


def list_text(entries: Sequence[Json], width: int | None = None) -> str:
    """One row a model."""
    header = ("MODEL", "SIZE", "FORMAT", "FITS", "LOADED", "NATIVE MTP")
    rows = [
        (
            text_of(entry.get("id")),
            size(entry.get("size_bytes")),
            text_of(entry.get("format")),
            fit_text(entry),
            _yes(entry.get("loaded")),
            _mtp_text(entry),
        )
        for entry in entries
    ]
    return joined(table(header, rows, width=width))


def model_text(entry: Json) -> str:
    fit: Json = entry.get("fits") or {}
    card: Json = entry.get("card") or {}
    experts = card.get("num_experts")
    kind = f"{card.get('model_type')}, {card.get('num_layers')} layers"
    native_mtp: Json = entry.get("native_mtp") or {}
    depth = f"; {native_mtp['depth_reason']}" if native_mtp.get("depth_reason") else ""
    speed = fit.get("tokens_per_second")
    how = "as measured" if fit.get("estimated") is False else "estimated"
    dtype = f"{fit['dtype']}: {text_of(fit.get('dtype_reason'))}" if fit.get("dtype") else "-"
    lines = {
        "model": text_of(entry.get("id")),
        "kind": kind + (f", {experts} experts" if experts else ""),
        "size": f"{size(entry.get('size_bytes'))}, {text_of(entry.get('format'))}",
        "context": f"{text_of(entry.get('context_length'))} tokens",
        "fits": fit_text(entry) + (f", {how} {speed:g} tokens a second" if speed else ""),
        "computes in": dtype,
        "native MTP": text_of(entry.get("mtp")) + depth,
        **_sampling_lines(entry),
        "folder": text_of(entry.get("folder") or "not on this machine"),
        **_file_lines(entry.get("files")),
    }
    others = [f"{v['repository']} ({v['bits']}-bit)" for v in entry.get("variants") or ()]
    if others:
        lines["quantised"] = ", ".join(others)
    return joined(f"{name:<11} {text}" for name, text in lines.items())


def _sampling_lines(entry: Json) -> dict[str, str]:
    """The sampling of requests that name none, and what of the files is not used."""
    lines: dict[str, str] = {}
    if sampling := entry.get("sampling"):
        lines["sampling"] = ", ".join(
            f"{name} {each['value']:g} ({each['source']})" for name, each in sampling.items()
        )
    if notes := entry.get("notes"):
        lines["notes"] = "; ".join(notes)
    return lines


def _file_lines(files: Json | None) -> dict[str, str]:
    """How many tensors the files have, and what their MTP head is; empty for no files."""
    if files is None:
        return {}
    head: Json = files["head"]
    text = text_of(head.get("reason"))
    if head["found"]:
        form = "quantised" if head["quantised"] else "not quantised"
        text = f"found: {size(head['bytes'])}, {form}, in {', '.join(head['files'])}"
    return {"files": f"good: {files['tensors']} tensors", "MTP head": text}


def recommendation_text(entries: Sequence[Json], width: int | None = None) -> str:
    """One row a model that fits, and how to get the first that is not here."""
    if not entries:
        return "no model that exo-node has a card of fits; `exo-node models pull` gets any other"
    header = ("MODEL", "SIZE", "FORMAT", "RUNS ON", "TOKENS/S", "NATIVE MTP", "ON DISK")
    rows = [
        (
            text_of(entry.get("id")),
            size(entry.get("size_bytes")),
            text_of(entry.get("format")),
            "one node" if fit["nodes"] == 1 else f"{fit['nodes']} nodes",
            text_of(fit.get("tokens_per_second")),
            _yes(entry.get("drafts")),
            _yes(entry.get("downloaded")),
        )
        for entry in entries
        for fit in [entry["fits"]]
    ]
    first = next((each["id"] for each in entries if not each.get("downloaded")), None)
    hint = f"`exo-node models pull {first}` gets it" if first else ""
    estimates = "Speeds are estimates until a model has answered here."
    return joined([*table(header, rows, width=width), "", estimates, hint])


def _yes(value: object) -> str:
    return "yes" if value else "no"


def fit_text(entry: Json) -> str:
    """How many nodes the model would need if nothing else ran, and its context if that is short."""
    fit: Json = entry.get("fits") or {}
    match fit.get("nodes"):
        case None:
            return "-"
        case 0:
            return f"no: needs {size(fit.get('needed_bytes'))}"
        case nodes:
            where = "yes" if nodes == 1 else f"on {nodes} nodes"
            return where + (f", {fit['context_length']:,} tokens" if fit.get("shortened") else "")


def _mtp_text(entry: Json) -> str:
    if entry.get("error"):
        return f"cannot be used: {entry['error']}"
    mtp: Json | None = entry.get("native_mtp")
    if mtp is not None and not mtp.get("enabled", True):
        return f"off: {mtp.get('reason') or 'its weights are missing'}"
    part = entry.get("partial_bytes")
    return text_of(entry.get("mtp")) + (f"; {size(part)} of it are here" if part else "")
