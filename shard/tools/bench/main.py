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
    """Raises InvalidSettings for prompts that cannot be used, and what loading raises."""
    prompts = bundled_prompts() if request.prompts is None else read_prompts(Path(request.prompts))
    # Seconds of imports: a prompts file with a fault is told of at once.
    from ...model import loader_import  # noqa: F401  # pyright: ignore[reportUnusedImport]  # first
    from .sweep import make_answers, make_arms, measure_steps, open_model, sweep

    _note(f"loading {spec.model}")
    loaded, engine = open_model(spec)
    chosen, ids, skipped = _encoded(request, spec, engine, prompts)
    for name in skipped:
        _note(f"skipped {name}")
    max_k = spec.max_draft_tokens if loaded.head is not None else 0
    no_drafts = "" if max_k else loaded.head_state
    if no_drafts:
        _note(f"sweeping K=0 only: {no_drafts}")
    costs = measure_steps(engine, ids, max_k) if max_k else None
    arms = make_arms(request, max_k)
    progress = _Progress()
    runs = sweep(make_answers(request, spec, arms, engine), ids, request, progress.show)
    progress.clear()
    return Results(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=_model_facts(spec, loaded),
        device=_device_facts(request),
        versions=_versions(),
        settings=_settings(request, spec),
        greedy_identity=engine.identity,
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
    """The files written, and why there is no plot where there is none.

    Raises InvalidSettings where the folder cannot be written to.
    """
    written = {folder / JSON_FILE: as_json(results), folder / CSV_FILE: as_csv(results)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in written.items():
            _ = path.write_text(text)
        plot = draw(results, folder)
    except OSError as error:
        raise InvalidSettings(
            f"--output {folder}: cannot be written ({error.strerror}); name another folder",
            param="--output",
        ) from error
    if isinstance(plot, NoPlot):
        return tuple(written), plot
    return (*written, *plot), None


def _encoded(
    request: BenchRequest, spec: pb.StageSpec, engine: "TextEngine", prompts: Sequence[Prompt]
) -> tuple[list[Prompt], list[list[int]], list[str]]:
    """The prompts that fit with their answers, their ids, and sentences about the others."""
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
    asked = ("max_tokens", "repeats", "temperature", "depths", "adaptive", "against_mlx_lm")
    loaded = ("context_length", "prefill_chunk", "fixed_rows", "draft_vocabulary")
    return {
        "prompts": "bundled" if request.prompts is None else Path(request.prompts).name,
        **{name: getattr(request, name) for name in asked},
        **{name: getattr(spec, name) for name in (*loaded, "async_draft_eval")},
    }


class _Progress:
    """One line on stderr: written over on a terminal, else once a repeat."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = 0
        self._last = ""

    def show(self, done: int, total: int, what: str) -> None:
        """See `bench_sweep.Progress`."""
        if self._terminal:
            text = f"{done}/{total} answers, {what}" if total else what
            print(f"\r{text.ljust(self._shown)}", end="", file=sys.stderr, flush=True)
            self._shown = len(text)
        elif (part := what.partition(",")[0]) != self._last:
            self._last = part
            _note(part)

    def clear(self) -> None:
        """Before other output."""
        if self._shown:
            print(f"\r{' ' * self._shown}\r", end="", file=sys.stderr, flush=True)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _compiling_apart() -> "AbstractContextManager[Callable[[], None]]":
    """Seconds of imports: a request with a fault is told of at once."""
    from ...model import loader_import  # noqa: F401  # pyright: ignore[reportUnusedImport]

    # isort: split
    from ...kernels.fused_code import compiling_apart

    return compiling_apart()


def _run(line: bytes) -> int:
    try:
        request, spec = parse_bench_request(line)
        # From here on, as what comes before takes no time and its error must be read.
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
    """Without sys.stdin: a thread that waits there would hold its lock when the process ends."""
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
    # Not by sys.exit: MLX's threads still run, and taking the process down under them aborts it.
    os._exit(status)


if __name__ == "__main__":
    main()
