"""`exo-node models graft`, `convert` and `check`."""

import json
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ...placement.errors import ExoNodeError
from .child import child_process
from .flags import AsJson, DataDir, ModelsDir
from .get_models import ProgressLine
from .models import fit_text, lines_text, models, sampling_lines, this_machine
from .output import note, print_json, size, text_of

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
    to = _output(output, settings, f"{target}-mtp") if output or _in_hub_cache(folder) else folder
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
    from ..store.checking import check as check_folder

    _, library, view = this_machine(data_dir, models_dir)
    checkpoint = check_folder(library, library.folder(model), view)
    print_json(checkpoint) if as_json else print(_check_text(checkpoint))


def _check_text(checkpoint: dict[str, Any]) -> str:
    head: dict[str, Any] = checkpoint["head"]
    mtp = head.get("reason")
    if head["found"]:
        bits = ", ".join(f"{each}-bit" for each in head["bits"]) or "not quantised"
        mtp = f"head found: {size(head['bytes'])}, {bits}, in {', '.join(head['files'])}"
    return lines_text(
        {
            "files": f"good: {checkpoint['tensors']} tensors, {size(checkpoint['size_bytes'])}",
            "kind": f"{checkpoint['model_type']}, {checkpoint['format']}",
            "fits": fit_text(checkpoint),
            **sampling_lines(checkpoint),
            "native MTP": text_of(mtp),
        }
    )


def _in_hub_cache(folder: "Path") -> bool:
    """Whether the folder is a snapshot, which exo-node must not change.

    The snapshot of the next revision would lack the addition.
    """
    return any(part.startswith("models--") for part in folder.parts)


def _output(path: str | None, settings: "Settings", name: str) -> "Path":
    from pathlib import Path

    if path is not None:
        return Path(path).expanduser().absolute()
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
    """Converts in a child process, which may import MLX. Raises ExoNodeError where it failed."""
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
    environment, pipe = settings.runner_environment(environ), subprocess.PIPE
    errors = pipe if as_json else None
    with child_process(_CHILD, json.dumps(request), environment, pipe, errors) as child:
        assert child.stdout is not None
        last_line = _pass_on(child.stderr) if child.stderr is not None else ""
        result = child.stdout.read()
        _ = child.wait()
    if child.returncode < 0:
        raise ExoNodeError(
            f"the conversion was ended by signal {-child.returncode}; if memory ran out, close "
            "other programs"
        )
    if child.returncode and as_json:
        raise ExoNodeError(last_line.removeprefix("exo-node: ") or "the conversion failed")
    if child.returncode:
        raise typer.Exit(1)  # the child has printed why
    _report(json.loads(result), as_json=as_json)


def _pass_on(lines: "Iterable[bytes]") -> str:
    """Writes all lines but the last to stderr and returns that one, which may be the error."""
    last = ""
    for line in lines:
        if last:
            note(last)
        last = line.decode(errors="replace").rstrip()
    return last


def _report(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    if result["note"]:
        note(result["note"])
    head = "with its MTP head" if result["head"] == "found" else f"without a head: {result['head']}"
    note(f"{result['folder']} is ready, {head}")
