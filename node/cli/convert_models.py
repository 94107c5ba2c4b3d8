"""`exo-node models graft`, `convert` and `import`."""

import json
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ...placement.errors import ExoNodeError
from .child import read_child
from .flags import DataDir, ModelsDir, argument, option
from .get_models import ProgressLine
from .models import models, this_machine
from .output import note

if TYPE_CHECKING:
    from pathlib import Path

    from ..machine.settings import Settings
    from ..store.head_source import HeadFolder
    from ..store.library import ModelLibrary

_CHILD: Final = "exo_node.shard.tools.convert.main"
_IMPORT: Final = "exo_node.shard.tools.convert.import_gguf"


def _supported(bits: int | None) -> int | None:
    if bits == 7:
        raise typer.BadParameter("MLX has no weights of 7 bits; choose 6 or 8")
    return bits


_Target = Annotated[str, argument("DST", "The model without a head: an id, or a folder.")]
_Source = Annotated[str, argument("SRC", "An unquantised model: an id, a folder.")]
_New = Annotated[
    str | None, argument("[DST]", "The new folder; default: in the data folder's models.")
]
_From = Annotated[
    str | None, option("SRC", "Where the head is: an id, a folder, a repository.", "--from")
]
_HeadBits = Annotated[
    int | None,
    option("BITS", "Quantise the head; default: as it is.", min=2, max=8, callback=_supported),
]
_Bits = Annotated[int, option("BITS", "Bits of a weight.", min=2, max=8, callback=_supported)]
_Revision = Annotated[str | None, option("REVISION", "Of the head's source.")]
_Output = Annotated[
    str | None,
    option(
        "DIR",
        "A new folder, which shares DST's files; default: DST itself, or for one of the "
        "Hugging Face cache a folder in the data folder's models.",
        "--output",
    ),
]
_File = Annotated[str, argument("FILE", "A GGUF file: its path, or its name in `exo-node models`.")]
_Name = Annotated[str | None, argument("[NAME]", "The new model's name; default: the file's.")]
_RestBits = Annotated[
    int | None,
    option(
        "BITS",
        "Quantise what cannot stay as it is in the file; default: bfloat16.",
        min=2,
        max=8,
        callback=_supported,
    ),
]
_Dense = Annotated[
    bool,
    typer.Option("--bfloat16", help="Make all weights bfloat16, which Linux CPUs compute faster."),
]


@models.command()
def graft(
    target: _Target,
    source: _From = None,
    mtp_bits: _HeadBits = None,
    revision: _Revision = None,
    output: _Output = None,
    models_dir: ModelsDir = None,
    data_dir: DataDir = None,
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
    _run(folder, to, None, head, mtp_bits)


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
) -> None:
    """Quantise a model, and keep its MTP head or add one."""
    settings, library, _ = this_machine(data_dir, models_dir)
    folder = library.folder(source)
    to = _output(target, settings, f"{source}-{bits}bit-mtp")
    head = _head(library, head_source, revision) if head_source else None
    _run(folder, to, bits, head, mtp_bits)


@models.command("import")
def import_file(
    file: _File,
    name: _Name = None,
    bits: _RestBits = None,
    bfloat16: _Dense = False,
    models_dir: ModelsDir = None,
    data_dir: DataDir = None,
) -> None:
    """Make a model of a GGUF file, such as Ollama's and LM Studio's.

    Weights of 4, 5 and 8 bits keep their numbers.
    """
    from pathlib import Path

    from ..machine.settings import environment, models_folders
    from ..store.gguf_places import by_name, by_path, in_model_folders, of_other_programs
    from ..store.places import copy_folder

    settings, library, _ = this_machine(data_dir, models_dir)
    places = in_model_folders(models_folders(settings))
    others = of_other_programs(Path.home(), environment())
    place = by_path(file) or by_name(file, [*places, *others])
    if place is None:
        raise typer.BadParameter(f"there is no GGUF file {file}", param_hint="FILE")
    name = name or place.import_name
    target = copy_folder(settings.data_dir / "models", name)
    if target is None:
        raise typer.BadParameter(f"{name!r} is no name of a model", param_hint="NAME")
    if name in {*library.scan(), *library.broken, *library.partial}:
        raise ExoNodeError(f"a model {name} is on this machine already; give another NAME")
    if bfloat16 and bits is not None:
        raise typer.BadParameter("give either --bits or --bfloat16", param_hint="--bits")
    paths = {"source": str(place.path), "target": str(target)}
    request = {**paths, "bits": bits, "dense": bfloat16}
    result = _child_result(_IMPORT, request)
    note(f"{name} is ready in {result['folder']}{_kept_text(result['tensors'])}")


def _kept_text(matrices: dict[str, int]) -> str:
    """How many matrices have how many bits."""
    counts = [f"{count} of {bits} bits" for bits, count in sorted(matrices.items())]
    return f"; matrices: {', '.join(counts)}" if counts else ""


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

    with ProgressLine(source) as show:
        return head_folder(library, source, revision, show)


def _run(
    source: "Path",
    target: "Path",
    bits: int | None,
    head: "HeadFolder | None",
    head_bits: int | None,
) -> None:
    """Converts in a child process and prints the result."""
    request = {
        "source": str(source),
        "target": str(target),
        "bits": bits,
        "head": str(head.folder) if head else "",
        "head_files": list(head.files) if head else [],
        "head_bits": head_bits,
    }
    result = _child_result(_CHILD, request)
    if result["note"]:
        note(result["note"])
    form = "with its MTP head" if result["head"] == "found" else f"without a head: {result['head']}"
    note(f"{result['folder']} is ready, {form}")


def _child_result(module: str, request: dict[str, Any]) -> dict[str, Any]:
    """The result of a child process, which may import MLX."""
    from ..machine import settings

    settings.check_mlx_extras(settings.installed_distributions())
    environment = settings.runner_environment(settings.environment())
    status, result = read_child(module, json.dumps(request), environment)
    if status:
        raise typer.Exit(1)  # the child has printed why
    return json.loads(result)
