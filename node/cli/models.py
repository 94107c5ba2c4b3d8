"""`exo-node models`: what is on the disk, what there is, and getting it."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .flags import AsJson, DataDir, LocalPort, ModelsDir, client_settings

if TYPE_CHECKING:
    from ...placement.cluster import ClusterView
    from ..machine.settings import Settings
    from ..store.library import ModelLibrary

_Catalog = Annotated[
    bool, typer.Option("--catalog", help="The models that exo-node has cards of, on disk or not.")
]

models: Final = typer.Typer(
    help="List the models on disk, and get others.",
    rich_markup_mode=None,
    invoke_without_command=True,
)


@models.callback()
def root(
    context: typer.Context,
    catalog: _Catalog = False,
    models_dir: ModelsDir = None,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List the models on disk, and get others.

    A running node is asked, and tells of its cluster; without one this machine's disk is read.
    """
    if context.invoked_subcommand is not None:
        return
    found = asked(port, data_dir, catalog=catalog)
    if found is None:
        found = _read(data_dir, models_dir, catalog=catalog)
    if as_json:
        print(json.dumps({"object": "list", "data": found}, indent=2))
        return
    from . import model_table

    print((model_table.catalogue if catalog else model_table.on_disk)(found))
    if not catalog:
        _note("`exo-node models recommend` names models that fit; `exo-node models pull` gets one")


def asked(
    port: str | None, data_dir: str | None, *, catalog: bool
) -> Sequence[Mapping[str, Any]] | None:
    """What a running node says; None where none runs on the data folder."""
    from . import client

    settings = client_settings(port, data_dir)
    try:
        endpoint = client.locate(settings)
    except client.CallFailed as error:
        if error.exit_code != client.EXIT_NO_NODE:
            raise
        return None
    return client.call(endpoint, f"/v1/models{'?catalog=1' * catalog}", timeout_s=60).get(
        "data", []
    )


def _read(
    data_dir: str | None, models_dir: list[str] | None, *, catalog: bool
) -> Sequence[Mapping[str, Any]]:
    from ..store import listing

    _, library, view = this_machine(data_dir, models_dir)
    listed: Callable[[ModelLibrary, ClusterView], list[dict[str, Any]]] = (
        listing.catalogue if catalog else listing.on_disk
    )
    return listed(library, view)


def this_machine(
    data_dir: str | None, models_dir: list[str] | None
) -> "tuple[Settings, ModelLibrary, ClusterView]":
    """What a command knows that asks no node. Raises InvalidSettings."""
    from ..machine import settings
    from ..machine.hardware import detect_hardware
    from ..placements.local_model import view_of
    from ..store.library import ModelLibrary

    flags = {"data_dir": data_dir, "models_dirs": models_dir or None}
    wanted = settings.load_settings(flags, settings.environment())
    hardware = detect_hardware(
        settings.installed_distributions(), wanted.memory_limit, settings.visible_gpus()
    )
    library = ModelLibrary(
        settings.models_folders(wanted), offline=wanted.offline, cards=wanted.cards_dir
    )
    return wanted, library, view_of(hardware, wanted)


def _note(text: str) -> None:
    typer.echo(text, err=True)
