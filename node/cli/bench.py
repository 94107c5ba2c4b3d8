"""`exo-node bench`: models measured in a child process, the cluster by its nodes."""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from .flags import AsJson, DataDir, Dtype, LocalPort, ModelsDir

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..placements.local_model import LocalModel

_CHILD: Final = "exo_node.shard.tools.bench.main"
_MAX_TEMPERATURE: Final = 2.0

_Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model's id, or a checkpoint's folder.")
]
_Depths = Annotated[
    str | None,
    typer.Option(
        "--k", metavar="K,K,…", help="Drafts a round to try; default: 1 to the card's max_k."
    ),
]
_Prompts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help='One prompt a line, or .jsonl with "prompt"; default: the bundled 32.',
    ),
]
_MaxTokens = Annotated[int, typer.Option(min=2, metavar="N", help="Longest answer.")]
_Repeats = Annotated[int, typer.Option(min=1, metavar="N", help="Times that every prompt runs.")]
_Temperature = Annotated[
    float, typer.Option(min=0, max=_MAX_TEMPERATURE, metavar="T", help="0 is greedy.")
]
_Against = Annotated[
    str | None,
    typer.Option(
        metavar="mlx-lm", help="Run mlx-lm's own loop as well, on a second copy in memory."
    ),
]
_Adaptive = Annotated[
    bool, typer.Option("--adaptive/--no-adaptive", help="Run adaptive K as well.")
]
_Output = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Where results go; default: a new folder in mtp-bench here."),
]
_PlacedModel = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Say where this model would be placed, and why."),
]
_Measure = Annotated[bool, typer.Option("--measure", help="Measure every link anew first.")]

bench = typer.Typer(
    help="Measure models on this machine, and the cluster.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.callback()
def _root() -> None:
    """Measure models on this machine, and the cluster."""


@bench.command()
def mtp(
    model: _Model = "demo",
    k: _Depths = None,
    prompts: _Prompts = None,
    max_tokens: _MaxTokens = 256,
    repeats: _Repeats = 3,
    temperature: _Temperature = 0.0,
    dtype: Dtype = None,
    against: _Against = None,
    adaptive: _Adaptive = True,
    output: _Output = None,
    models_dir: ModelsDir = None,
) -> None:
    """Sweep K: speed, acceptance, break-even and time to first token.

    Prints tables; writes JSON, CSV and, with matplotlib, a plot. Close other programs first.
    """
    if against not in (None, "mlx-lm"):
        raise _wrong("--against", f"{against!r}; it knows mlx-lm")
    depths = _depths(k)
    folder = _output_folder(output, model)
    found, environment = _found(model, {"dtype": dtype, "models_dirs": models_dir or None})
    request: dict[str, object] = {
        **_model_facts(found),
        "depths": _within(depths, found),
        "adaptive": adaptive and found.spec.native_mtp,
        "against_mlx_lm": against is not None,
        "prompts": None if prompts is None else _absolute(prompts),
        "max_tokens": max_tokens,
        "repeats": repeats,
        "temperature": temperature,
        "output": str(folder),
    }
    raise typer.Exit(_run(request, folder, environment))


@bench.command()
def cluster(
    model: _PlacedModel = None,
    measure: _Measure = False,
    port: LocalPort = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what the cluster's nodes and links were measured to do.

    A running node is asked. Layers are timed when a node first loads a model, links when a node
    joins and every few minutes while nothing is generated.
    """
    from .bench_cluster import bench_cluster

    bench_cluster(model=model, measure=measure, port=port, data_dir=data_dir, as_json=as_json)


def _found(model: str, flags: "Mapping[str, object]") -> "tuple[LocalModel, Mapping[str, str]]":
    """The model, and the environment of the child that loads it. Raises what `resolve` raises."""
    from ..machine import settings
    from ..placements.local_model import resolve

    environ = settings.environment()
    wanted = settings.load_settings(flags, environ)
    distributions = settings.installed_distributions()
    settings.check_mlx_extras(distributions)
    return resolve(model, wanted, distributions), settings.runner_environment(environ)


def _run(request: "Mapping[str, object]", folder: "Path", environment: "Mapping[str, str]") -> int:
    import json

    from .child import run_child

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _wrong("--output", f"{folder} cannot be made ({error.strerror})") from error
    try:
        return run_child(_CHILD, json.dumps(request), environment)
    finally:
        if not any(folder.iterdir()):  # it failed
            folder.rmdir()


def _model_facts(found: "LocalModel") -> dict[str, object]:
    return {
        "stage": found.spec.SerializeToString().hex(),
        "chip": found.hardware.chip,
        "backend": found.hardware.backend,
        "memory_bytes": found.hardware.total_bytes,
    }


def _depths(text: str | None) -> list[int] | None:
    """Each K once, in order; 0 always runs and may be named."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 4 for part in parts):
        raise _wrong("--k", f"{text!r}; write numbers with commas between them, such as 1,2,3")
    return sorted({int(part) for part in parts} - {0})


def _within(depths: list[int] | None, found: "LocalModel") -> list[int]:
    """What the model can draft: nothing where it does not, whatever was asked for."""
    native = found.card.native_mtp
    if native is None or not found.spec.native_mtp:
        return []
    if depths is None:
        return list(range(1, native.max_k + 1))
    if depths and depths[-1] > native.max_k:
        raise _wrong(
            "--k",
            f"{depths[-1]}, and {found.card.id} drafts at most {native.max_k} tokens a round; ask "
            "for less, or raise max_k in the exo-card.toml of its folder",
        )
    return depths


def _output_folder(given: str | None, model: str) -> "Path":
    """A folder without files in it, so that no earlier result is written over."""
    from datetime import datetime
    from pathlib import Path

    if given is None:
        name = Path(model).expanduser().name or "model"
        return Path.cwd() / "mtp-bench" / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(given).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise _wrong("--output", f"{given} is not a folder; name another one")
    if folder.is_dir() and any(folder.iterdir()):
        raise _wrong("--output", f"{given} is not empty; name a new folder")
    return folder


def _absolute(path: str) -> str:
    from pathlib import Path

    return str(Path(path).expanduser().absolute())


def _wrong(flag: str, what: str) -> Exception:
    from ...placement.errors import InvalidSettings

    return InvalidSettings(f"{flag}: {what}", param=flag)
