"""`exo-node models graft`, `convert` and `check`."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ...placement.errors import ExoNodeError
from .flags import AsJson, DataDir, ModelsDir
from .get_models import ProgressLine
from .models import models, this_machine

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ..machine.settings import Settings
    from ..store.head_source import HeadFolder
    from ..store.library import ModelLibrary

_CHILD: Final = "exo_node.shard.tools.convert.main"

_Target = Annotated[
    str, typer.Argument(metavar="DST", help="The model without a head: an id, or a folder.")
]
_Source = Annotated[
    str, typer.Argument(metavar="SRC", help="An unquantised model: an id, a folder.")
]
_New = Annotated[
    str | None,
    typer.Argument(metavar="[DST]", help="The new folder; default: in the data folder's models."),
]
_From = Annotated[
    str | None,
    typer.Option("--from", metavar="SRC", help="Where the head is: an id, a folder, a repository."),
]
_HeadBits = Annotated[
    int | None,
    typer.Option(min=2, max=8, metavar="BITS", help="Quantise the head; default: as it is."),
]
_Bits = Annotated[int, typer.Option(min=2, max=8, metavar="BITS", help="Bits of a weight.")]
_Revision = Annotated[str | None, typer.Option(metavar="REVISION", help="Of the head's source.")]
_Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        metavar="DIR",
        help="A new folder, which shares DST's files; default: DST itself, or for one of the "
        "Hugging Face cache a folder in the data folder's models.",
    ),
]
_Checked = Annotated[str, typer.Argument(metavar="MODEL", help="A model's id, or a folder.")]


@models.command()
def graft(
    target: _Target,
    source: _From = None,
    mtp_bits: _HeadBits = None,
    revision: _Revision = None,
    output: _Output = None,
    models_dir: ModelsDir = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Bring back the MTP head that a conversion dropped.

    Of a repository only the files that hold the head are downloaded.
    """
    if source is None:
        raise typer.BadParameter("name the model that has the head", param_hint="--from")
    settings, library, _ = this_machine(data_dir, models_dir)
    folder = library.folder(target)
    to = _output(output, settings, f"{target}-mtp") if output or _cached(folder) else folder
    head = _head(library, source, revision)
    _run(folder, to, None, head, mtp_bits, as_json=as_json)


@models.command()
def convert(
    source: _Source,
    target: _New = None,
    bits: _Bits = 4,
    head_source: _From = None,
    mtp_bits: _HeadBits = None,
    revision: _Revision = None,
    models_dir: ModelsDir = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Quantise a model, and keep its MTP head or add one."""
    settings, library, _ = this_machine(data_dir, models_dir)
    folder = library.folder(source)
    to = _output(target, settings, f"{source}-{bits}bit-mtp")
    head = _head(library, head_source, revision) if head_source else None
    _run(folder, to, bits, head, mtp_bits, as_json=as_json)


@models.command()
def check(
    model: _Checked,
    models_dir: ModelsDir = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Check a model's files without loading them, and say what its MTP head is.

    Exit status 1, with the file and the remedy, where it would not load.
    """
    from ..store.checking import check as checked

    _, library, view = this_machine(data_dir, models_dir)
    found = checked(library, library.folder(model), view)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    from . import model_table

    print(model_table.checked(found))


def _cached(folder: "Path") -> bool:
    """A snapshot is not ours to change, and its next revision would lack what was added."""
    return any(part.startswith("models--") for part in folder.parts)


def _output(given: str | None, settings: "Settings", name: str) -> "Path":
    from pathlib import Path

    if given is not None:
        return Path(given).expanduser().absolute()
    named = Path(name)
    short = named.name if name.startswith(("/", ".", "~")) else name.replace("@", "-")
    return settings.data_dir / "models" / short


def _head(library: "ModelLibrary", source: str, revision: str | None) -> "HeadFolder":
    from ..store.head_source import head_folder

    line = ProgressLine(source)
    try:
        return head_folder(library, source, revision, line.show)
    finally:
        line.end()


def _run(
    source: "Path",
    target: "Path",
    bits: int | None,
    head: "HeadFolder | None",
    head_bits: int | None,
    *,
    as_json: bool,
) -> None:
    """In a process of its own, which may import MLX. Raises ExoNodeError where it failed."""
    import subprocess

    from ..machine import settings

    environ = settings.environment()
    settings.check_mlx_extras(settings.installed_distributions())
    request = {
        "source": str(source),
        "target": str(target),
        "bits": bits,
        "head": str(head.folder) if head else "",
        "head_files": list(head.files) if head else [],
        "head_bits": head_bits,
    }
    child = subprocess.Popen(
        (sys.executable, "-P", "-m", _CHILD),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if as_json else None,
        env=dict(settings.runner_environment(environ)),
    )
    assert child.stdin is not None and child.stdout is not None
    with child:  # its stdin stays open while it works: the end of this process is its end
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
        last = _passed_on(child.stderr) if child.stderr is not None else ""
        said = child.stdout.read()
    if child.returncode > 0 and as_json:
        raise ExoNodeError(last.removeprefix("exo-node: ") or "the conversion failed")
    if child.returncode:
        raise typer.Exit(1 if child.returncode > 0 else _signalled(-child.returncode))
    _tell(json.loads(said), as_json=as_json)


def _passed_on(lines: "Iterable[bytes]") -> str:
    """Writes them to stderr but for the last, which is the error's where there is one."""
    last = ""
    for line in lines:
        if last:
            print(last, file=sys.stderr, flush=True)
        last = line.decode(errors="replace").rstrip()
    return last


def _signalled(number: int) -> int:
    raise ExoNodeError(
        f"the conversion was ended by signal {number}; if memory ran out, close other programs"
    )


def _tell(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    if result["note"]:
        print(result["note"], file=sys.stderr)
    head = "with its MTP head" if result["head"] == "found" else f"without a head: {result['head']}"
    print(f"{result['folder']} is ready, {head}", file=sys.stderr)
