"""`exo-node models pull`, `rm`, `show` and `recommend`."""

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ...placement.errors import ExoNodeError, InvalidSettings
from .flags import AsJson, DataDir, LocalPort, ModelsDir
from .models import models, this_machine

if TYPE_CHECKING:
    from ..store.transfers import Progress

_Id = Annotated[str, typer.Argument(metavar="ID", help="A model's id, OWNER/NAME on the hub.")]
_Revision = Annotated[
    str | None,
    typer.Option(metavar="REVISION", help="A branch, tag or commit; default: the main branch."),
]
_Quant = Annotated[
    int | None,
    typer.Option(
        min=2, max=8, metavar="BITS", help="The published quantisation of so many bits instead."
    ),
]
_Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

_LINE_EVERY_S: Final = 10.0
_DRAWN_EVERY_S: Final = 0.2


@models.command()
def pull(
    id: _Id,
    revision: _Revision = None,
    quant: _Quant = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Download a model into the Hugging Face cache.

    It goes on where an earlier download stopped. No node has to run; one that does sees the model
    at once.
    """
    from ..store.hub_download import download

    settings, library, _ = this_machine(data_dir, None)
    repository, fixed = library.repository(id, quant)
    bar = ProgressLine(repository)
    try:
        folder = download(repository, revision or fixed, bar.show, offline=settings.offline)
    finally:
        bar.end()
    name = f"{repository}@{revision}" if revision and revision != "main" else repository
    if as_json:
        print(json.dumps({"id": name, "folder": str(folder)}, indent=2))
        return
    _note(f"{name} is here; with a node running (`exo-node start`),")
    _note(f"`exo-node chat --model {name} PROMPT` asks it")


@models.command()
def rm(
    id: _Id,
    yes: _Yes = False,
    models_dir: ModelsDir = None,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Delete a model from this machine's disk."""
    settings, library, _ = this_machine(data_dir, models_dir)
    _refuse_loaded(id, port, data_dir)
    if not yes:
        _ask(id)
    freed = library.remove(id, settings.data_dir / "models")
    if as_json:
        print(json.dumps({"id": id, "deleted": True, "freed_bytes": freed}, indent=2))
        return
    from .output import size

    _note(f"{id} is deleted; {size(freed)} are free again")


@models.command()
def show(
    id: _Id, models_dir: ModelsDir = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Show what is known of a model: sizes, format, whether it fits, and its native MTP."""
    from ..store.listing import describe

    _, library, view = this_machine(data_dir, models_dir)
    found = describe(library, id, view)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    from . import model_table

    print(model_table.one(found))


@models.command()
def recommend(port: LocalPort = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Name the models that fit this machine, and this cluster, best; those with MTP first."""
    from ..store.listing import catalogue, recommended
    from .models import asked

    _, library, view = this_machine(data_dir, None)
    here = recommended(catalogue(library, view))
    cluster = asked(port, data_dir, catalog=True)
    others = recommended(cluster) if cluster is not None else []
    wider = [entry for entry in others if entry["id"] not in {each["id"] for each in here}]
    if as_json:
        print(json.dumps({"this_machine": here, "cluster": wider}, indent=2))
        return
    from . import model_table

    print(model_table.recommended(here, wider))


def _refuse_loaded(id: str, port: str | None, data_dir: str | None) -> None:
    """Raises ExoNodeError where a running node has the model loaded."""
    from .models import asked

    for entry in asked(port, data_dir, catalog=False) or ():
        if entry.get("id") == id and entry.get("loaded"):
            raise ExoNodeError(f"{id} is loaded; `exo-node models unload {id}` unloads it")


def _ask(id: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidSettings(f"--yes: say that {id} may be deleted", param="--yes")
    typer.confirm(f"Delete {id} from this machine's disk?", abort=True, err=True)


class ProgressLine:
    """A download's progress: one line that is written over on a terminal, else one now and then."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._terminal = sys.stderr.isatty()
        self._first: tuple[float, int] | None = None
        self._shown_at = 0.0
        self._drawn = False

    def show(self, news: "Progress") -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = (now, news.done_bytes)
        every = _DRAWN_EVERY_S if self._terminal else _LINE_EVERY_S
        done = news.done_bytes >= news.total_bytes
        if now - self._shown_at < every and not done:
            return
        self._shown_at = now
        text = self._text(news, now)
        if self._terminal:
            print(f"\r{text.ljust(79)}", end="", file=sys.stderr, flush=True)
            self._drawn = True
        else:
            _note(text)

    def end(self) -> None:
        if self._drawn:
            print(file=sys.stderr, flush=True)

    def _text(self, news: "Progress", now: float) -> str:
        began, before = self._first or (now, 0)
        share = 100 * news.done_bytes // max(news.total_bytes, 1)
        text = f"{self._name}: {news.done_bytes / 1e9:,.2f} of {news.total_bytes / 1e9:,.2f} GB"
        text += f" ({share} %)"
        rate = (news.done_bytes - before) / (now - began) if now > began else 0.0
        if rate > 0 and news.done_bytes < news.total_bytes:
            left = (news.total_bytes - news.done_bytes) / rate
            text += f", {rate / 1e6:,.1f} MB/s, {_duration(left)} left"
        return text


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
