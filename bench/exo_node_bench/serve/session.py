"""One bench from its first request to its files, also where it is interrupted or fails."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from exo_node.placement.errors import ExoNodeError

from ..folder import PAGE_FILE, claim, csv_text, release, write
from ..page import render
from .facts import client_facts, describe
from .figures import BenchRun, failures
from .record import Record, settings_of
from .result import Result
from .result_page import page_of
from .runs import BenchPlan, measure, prepare
from .server import connections
from .workload_tables import clients_text

JSON_FILE, CSV_FILE = "serve.json", "serve.csv"


class OutputLost(ExoNodeError):
    """The results could not be written, although the folder was writable before the bench."""


@dataclass(slots=True)
class Session:
    """A bench of `plan`; `note` shows a line of progress to a person."""

    plan: BenchPlan
    folder: Path
    note: Callable[[str], None]
    record: Record | None = field(default=None, init=False)
    is_interrupted: bool = field(default=False, init=False)

    @property
    def has_runs(self) -> bool:
        return self.record is not None and bool(self.record.runs)

    def measure(self) -> None:
        """Claims the folder and measures; returns after Ctrl-C too.

        Raises InvalidSettings for the folder, UnusableServer.
        """
        claim(self.folder, JSON_FILE)
        try:
            asyncio.run(self._measure())
        except KeyboardInterrupt:
            self.is_interrupted = True
            if self.record is not None:
                self.record.state = "interrupted"
        finally:
            if not self.has_runs:
                release(self.folder, JSON_FILE)

    def failures(self) -> list[str]:
        """Sentences about failed requests, with the servers' texts."""
        counts = failures(self.record.runs if self.record else [])
        return [
            f"{server}: {count} failed: {text}"
            for server, texts in counts.items()
            for text, count in texts.most_common()
        ]

    async def _measure(self) -> None:
        plan = self.plan
        async with connections(plan.silence_s, max(plan.concurrencies)) as client:
            self.note("warming up; a model that is not loaded is loaded now")
            calibration = await prepare(client, plan)
            record = self.record = Record(
                date=datetime.now(UTC).isoformat(timespec="seconds"),
                client=client_facts(),
                settings=settings_of(plan, calibration),
                runs_planned=plan.runs,
                servers=[await describe(client, server) for server in plan.servers],
            )
            async for run in measure(client, plan, calibration):
                record.add(run)
                self._note_run(run, len(record.runs))
                try:
                    write(self.folder, {JSON_FILE: _json(record.result())})
                except OSError as error:  # there may be room again at the end
                    self.note(f"{self.folder} cannot be written to ({error.strerror})")
            record.state = "complete" if len(record.runs) == plan.runs else "limit"

    def _note_run(self, run: BenchRun, count: int) -> None:
        what = f"{run.workload}, {clients_text(run.concurrency)}, {run.server}"
        answers = f"{len(run.good)} of {len(run.answers)} answers in {run.duration:.1f} s"
        self.note(f"{count}/{self.plan.runs} {what}: {answers}")

    def write(self, result: Result) -> None:
        """Writes all files. Raises OutputLost."""
        try:
            write(self.folder, {JSON_FILE: _json(result), CSV_FILE: csv_text(_rows(result))})
            write(self.folder, {PAGE_FILE: render(page_of(result))})
        except OSError as error:
            raise OutputLost(
                f"--output: {self.folder} cannot be written to any more ({error.strerror}); the "
                "tables above are what was measured",
                param="--output",
            ) from error


def _json(result: Result) -> str:
    return f"{result.model_dump_json(indent=1)}\n"


def _rows(result: Result) -> list[dict[str, object]]:
    """One row for each run."""
    return [
        {
            "server": run.server,
            "workload": run.workload,
            "max_concurrency": run.max_concurrency,
            "repeat": run.repeat,
            "output_tokens_by": run.output_tokens_by,
            **run.figures,
        }
        for run in result.runs
    ]
