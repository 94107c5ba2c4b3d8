"""The child process of `exo-node bench mtp`: reads one request, runs it, writes the results.

Started as `python -P -m exo_node.shard.tools.bench.main` with the request as one JSON line on
stdin. Tables go to stdout, notes and one line for an error to stderr. It ends when stdin does.
"""

import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from ....placement.errors import ExoNodeError, InvalidSettings
from ....proto import peer_pb2 as pb
from ..prompts.prompts import Prompt, bundled_prompts, read_prompts
from .output import PromptFacts, Results, as_csv, as_json, as_text
from .plot import NoPlot, draw
from .report import summarise, summarise_categories
from .request import BenchRequest, parse_bench_request

if TYPE_CHECKING:
    from ...engine.text_engine import TextEngine
    from ...model.load import Loaded

MAX_REQUEST_BYTES: Final = 1 << 20
JSON_FILE, CSV_FILE = "mtp.json", "mtp.csv"


def run_bench(request: BenchRequest, spec: pb.StageSpec) -> Results:
    """Runs a sweep. Raises InvalidSettings for unusable prompts, and the errors of loading."""
    prompts = bundled_prompts() if request.prompts is None else read_prompts(Path(request.prompts))
    # These imports take seconds; a faulty prompts file is reported before them.
    from ...model import loader_import  # noqa: F401  # pyright: ignore[reportUnusedImport]  # first
    from .sweep import make_answers, make_arms, measure_steps, open_model, sweep

    _note(f"loading {spec.model}")
    loaded, engine = open_model(spec)
    chosen, ids, skipped = _encode_prompts(request, spec, engine, prompts)
    for name in skipped:
        _note(f"skipped {name}")
    max_k = spec.max_draft_tokens if loaded.head is not None else 0
    no_drafts = "" if max_k else loaded.head_state
    if no_drafts:
        _note(f"sweeping no K above 0: {no_drafts}")
    costs = measure_steps(engine, ids, max_k) if max_k else None
    if request.lookup and engine.lookup.off_reason:
        _note(f"no arms with prompt lookup: {engine.lookup.off_reason}")
    arms = make_arms(request, max_k, copies=not engine.lookup.off_reason)
    progress = _Progress()
    runs = sweep(make_answers(request, spec, arms, engine), ids, request, progress.show)
    progress.clear()
    return Results(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=_model_facts(spec, loaded),
        device=_device_facts(request),
        versions=_versions(),
        settings=_settings(request, spec),
        greedy_identity=engine.measurements.identity,
        no_drafts=no_drafts,
        skipped=tuple(skipped),
        costs=costs,
        arms=summarise(arms, runs, costs),
        categories=summarise_categories(arms, runs, [prompt.category for prompt in chosen]),
        prompts=tuple(
            PromptFacts(prompt.name, prompt.category, len(row))
            for prompt, row in zip(chosen, ids, strict=True)
        ),
        runs=tuple(runs),
    )


def write_results(results: Results, folder: Path) -> tuple[tuple[Path, ...], NoPlot | None]:
    """Writes the results; returns the files, and the reason if there is no plot.

    Raises InvalidSettings if the folder cannot be written to.
    """
    texts = {folder / JSON_FILE: as_json(results), folder / CSV_FILE: as_csv(results)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            _ = path.write_text(text)
        plot = draw(results, folder)
    except OSError as error:
        raise InvalidSettings(
            f"--output {folder}: cannot be written ({error.strerror}); name another folder",
            param="--output",
        ) from error
    if isinstance(plot, NoPlot):
        return tuple(texts), plot
    return (*texts, *plot), None


def _encode_prompts(
    request: BenchRequest, spec: pb.StageSpec, engine: "TextEngine", prompts: Sequence[Prompt]
) -> tuple[list[Prompt], list[list[int]], list[str]]:
    """The prompts that fit with their answers, their ids, and messages about the others."""
    chosen: list[Prompt] = []
    ids: list[list[int]] = []
    skipped: list[str] = []
    for prompt in prompts:
        row = engine.encode([{"role": "user", "content": prompt.text}])
        if len(row) + request.max_tokens > spec.context_length:
            skipped.append(
                f"{prompt.name}: its {len(row)} tokens and --max-tokens {request.max_tokens} are "
                f"over the context of {spec.context_length}"
            )
            continue
        chosen.append(prompt)
        ids.append(row)
    if not chosen:
        raise InvalidSettings(
            f"no prompt fits: {skipped[0]}; shorten the prompts or lower --max-tokens",
            param="--prompts",
        )
    return chosen, ids, skipped


def _model_facts(spec: pb.StageSpec, loaded: "Loaded") -> dict[str, object]:
    return {
        "id": spec.model,
        "dtype": spec.dtype,
        "layers": spec.num_layers,
        "fingerprint": loaded.fingerprint,
        "weight_bytes": loaded.weight_bytes,
        "head_bytes": loaded.head_bytes,
        "head": loaded.head_state,
        "max_k": spec.max_draft_tokens,
    }


def _device_facts(request: BenchRequest) -> dict[str, object]:
    import mlx.core as mx

    return {
        "chip": request.chip,
        "backend": request.backend,
        "memory_bytes": request.memory_bytes,
        "peak_memory_bytes": mx.get_peak_memory(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _versions() -> dict[str, str]:
    names = ("exo-node", "mlx", "mlx-lm")
    return {name: version(name) for name in names} | {"Python": platform.python_version()}


def _settings(request: BenchRequest, spec: pb.StageSpec) -> dict[str, object]:
    request_fields = (
        "max_tokens",
        "repeats",
        "temperature",
        "depths",
        "adaptive",
        "initial_k",
        "lookup",
        "against_mlx_lm",
    )
    spec_fields = ("context_length", "prefill_chunk", "fixed_rows", "draft_vocabulary")
    return {
        "prompts": "bundled" if request.prompts is None else Path(request.prompts).name,
        **{name: getattr(request, name) for name in request_fields},
        **{name: getattr(spec, name) for name in (*spec_fields, "async_draft_eval")},
    }


class _Progress:
    """A progress line on stderr: overwritten on a terminal, else one for each repeat."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._width = 0
        self._last = ""

    def show(self, answers: int, total: int, what: str) -> None:
        """Shows progress; a `sweep.Progress`."""
        if self._terminal:
            text = f"{answers}/{total} answers, {what}" if total else what
            print(f"\r{text.ljust(self._width)}", end="", file=sys.stderr, flush=True)
            self._width = len(text)
        elif (part := what.partition(",")[0]) != self._last:
            self._last = part
            _note(part)

    def clear(self) -> None:
        """Clears the line, before other output."""
        if self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _compiling_apart() -> "AbstractContextManager[Callable[[], None]]":
    """A late import: it takes seconds, and a faulty request is reported before it."""
    from ...model import loader_import  # noqa: F401  # pyright: ignore[reportUnusedImport]

    # isort: split
    from ...kernels.fused_code import compiling_apart

    return compiling_apart()


def _run(line: bytes) -> int:
    try:
        request, spec = parse_bench_request(line)
        # Only now: the steps before take no time, and their error must reach the parent.
        threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
        with _compiling_apart() as keep_compiled:
            results = run_bench(request, spec)
            keep_compiled()
        files, no_plot = write_results(results, Path(request.output))
    except ExoNodeError as error:
        _note(f"exo-node: {error.message}")
        return 2 if isinstance(error, InvalidSettings) else 1
    print(as_text(results), flush=True)
    if no_plot is not None:
        _note(f"no plot was drawn: {no_plot.reason}")
    _note("written: " + ", ".join(str(path) for path in files))
    return 0


def _first_line() -> bytes:
    """The first line of stdin. Not by sys.stdin, whose lock a waiting thread would hold at exit."""
    line = b""
    while not line.endswith(b"\n") and len(line) <= MAX_REQUEST_BYTES:
        part = os.read(0, 65536)
        if not part:
            break
        line += part
    return line


def _end_with_parent() -> None:
    while os.read(0, 65536):
        pass
    os._exit(1)


def main() -> NoReturn:
    """Entry point of the child process."""
    status = _run(_first_line())
    sys.stdout.flush()
    # Not by sys.exit, which would abort: MLX's threads still run.
    os._exit(status)


if __name__ == "__main__":
    main()
