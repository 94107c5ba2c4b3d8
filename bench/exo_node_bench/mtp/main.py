"""The child process of `exo-node bench mtp`: reads one request, runs it, writes the results.

Started as `python -P -m exo_node_bench.mtp.main`. Tables go to stdout, notes to stderr.
"""

import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from exo_node.placement.errors import InvalidSettings
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.tools.child import compile_apart, model_facts, note, package_version, run_child

from ..folder import PAGE_FILE, csv_text, fault, write
from ..page import render
from ..prompts import Prompt, bundled_prompts, read_prompts
from .arm_tables import as_text
from .report import summarise, summarise_categories
from .request import JSON_FILE, BenchRequest
from .result_page import page_of
from .results import PromptFacts, Results, as_json, as_rows

if TYPE_CHECKING:
    from exo_node.shard.engine.answers.text_engine import TextEngine

CSV_FILE = "mtp.csv"


def run_bench(request: BenchRequest, spec: pb.StageSpec) -> Results:
    """Runs a sweep. Raises InvalidSettings for unusable prompts, and the errors of loading."""
    prompts = bundled_prompts() if request.prompts is None else read_prompts(Path(request.prompts))
    # These imports take seconds; a faulty prompts file is reported before them.
    from exo_node.shard.model import loader_import  # noqa: F401  # pyright: ignore[reportUnusedImport]  # first

    from .sweep import make_answers, make_arms, measure_steps, open_model, sweep

    note(f"loading {spec.model}")
    loaded, engine = open_model(spec)
    chosen, ids, skipped = _encode_prompts(request, spec, engine, prompts)
    for name in skipped:
        note(f"skipped {name}")
    max_k = engine.drafting.depth
    no_drafts = "" if max_k else loaded.head_state
    if no_drafts:
        note(f"sweeping no K above 0: {no_drafts}")
    if engine.drafting.limit_reason:
        note(engine.drafting.limit_reason)
    costs = measure_steps(engine, ids, max_k) if max_k else None
    if request.lookup and engine.lookup.off_reason:
        note(f"no arms with prompt lookup: {engine.lookup.off_reason}")
    arms = make_arms(request, max_k, copies=not engine.lookup.off_reason)
    progress = _Progress()
    runs = sweep(make_answers(request, spec, arms, engine), ids, request, progress.show)
    progress.clear()
    return Results(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=model_facts(spec, loaded) | {"max_k": spec.max_draft_tokens},
        device=_device_facts(request),
        versions={name: package_version(name) for name in ("exo-node", "mlx", "mlx-lm")}
        | {"Python": platform.python_version()},
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


def write_results(results: Results, folder: Path) -> None:
    """Writes the results. Raises InvalidSettings if the folder cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder, {JSON_FILE: as_json(results), CSV_FILE: csv_text(as_rows(results))})
        write(folder, {PAGE_FILE: render(page_of(results))})
    except OSError as error:
        raise fault(folder, f"cannot be written to ({error.strerror}); name another") from error


def _encode_prompts(
    request: BenchRequest, spec: pb.StageSpec, engine: "TextEngine", prompts: Sequence[Prompt]
) -> tuple[list[Prompt], list[list[int]], list[str]]:
    """The prompts that fit with their answers, their ids, and messages about the others."""
    chosen: list[Prompt] = []
    ids: list[list[int]] = []
    skipped: list[str] = []
    for prompt in prompts:
        row = engine.codec.encode_chat([{"role": "user", "content": prompt.text}])
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
    spec_fields = ("context_length", "prefill_chunk", "draft_vocabulary")
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
            note(part)

    def clear(self) -> None:
        """Clears the line, before other output."""
        if self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)


def _run(request: BenchRequest) -> int:
    with compile_apart():
        results = run_bench(request, request.spec)
    print(as_text(results), flush=True)
    write_results(results, Path(request.output))
    note(f"written to {request.output}: {PAGE_FILE} is the page")
    return 0


def main() -> NoReturn:
    """Entry point of the child process."""
    run_child("bench mtp", BenchRequest, _run)


if __name__ == "__main__":
    main()
