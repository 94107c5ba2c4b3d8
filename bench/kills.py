"""Random kills under answers of three stages: are all tokens delivered, and when?

    python bench/kills.py [--kills 200] [--seed 1] [--only NUMBER]
    python bench/kills.py --heads 100 [--shape pipeline] [--tokens 256] [--seed 1] [--json FILE]
    python bench/kills.py --pairs 20 [--tokens 256] [--json FILE]

`--heads` kills, stops or hangs the head under four answers of other nodes, `--pairs` kills the
larger of two machines. Without them each trial asks a question, kills or stops a runner or
a node at a random moment, and compares the answer's ids with those of an undisturbed one.
Ends with status 1 if anything was lost, repeated, too late or kept too long.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))

import head_trials
from laboratory import Laboratory, laboratory
from listening import SILENCE_S, ask
from trials import Outcome, Trial, attempt, questions, trials


def main() -> int:
    os.environ.setdefault("EXO_MEASURE_AT_LOAD", "0")  # as people's nodes; tests' nodes measure
    parser = argparse.ArgumentParser(description="Random kills under answers")
    _ = parser.add_argument("--kills", type=int, default=200, help="answers that are hit")
    _ = parser.add_argument("--seed", type=int, default=1)
    _ = parser.add_argument("--only", type=int, help="the number of one trial, to repeat it")
    _ = parser.add_argument("--heads", type=int, default=0, help="blows against the head")
    _ = parser.add_argument("--shape", choices=head_trials.SHAPES, help="of all placements then")
    _ = parser.add_argument("--pairs", type=int, default=0, help="losses of one of two machines")
    _ = parser.add_argument("--tokens", type=int, default=256, help="of each answer then")
    _ = parser.add_argument("--json", type=Path, help="where their outcomes are written")
    options = parser.parse_args()
    if options.heads or options.pairs:
        return _heads(options) if options.heads else _pairs(options)
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as scratch,
        laboratory(Path(scratch)) as lab,
    ):
        answers = [question.answered_by(lab) for question in questions()]
        planned = trials(options.seed, answers)
        if options.only is not None:
            planned = islice(planned, options.only, options.only + 1)
        outcomes = list(_run(lab, planned, options.kills))
        print(f"\nThe first placement took {lab.load_s:.1f} s to load")
        print(f"Stages had to be spread over the nodes anew {lab.collapsed} times")
    _report(outcomes)
    print(f"{time.monotonic() - start:.0f} s in all, seed {options.seed}")
    return 1 if any(outcome.faults for outcome in outcomes) else 0


def _heads(options: argparse.Namespace) -> int:
    """Strikes the head; the exit status."""
    outcomes: list[head_trials.Outcome] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        laboratory(Path(scratch)) as lab,
    ):
        expected = head_trials.undisturbed(lab, options.tokens)
        shapes = [options.shape] if options.shape else head_trials.SHAPES
        for blow in head_trials.blows(options.seed, options.heads, options.tokens, shapes):
            outcome = head_trials.strike(lab, blow, options.tokens, expected)
            outcomes.append(outcome)
            _write(options.json, [each.describe() for each in outcomes])
            verdict = "; ".join(outcome.faults) or "as undisturbed"
            where = "stage lost" if blow.stage else "no stage"
            print(
                f"{blow.name:8} {blow.shape:11} {blow.how:13} {where:10} "
                f"gap {outcome.gap_s:5.2f} s, {outcome.resumes} resumed, {outcome.hit} hit  "
                f"{verdict}",
                flush=True,
            )
            head_trials.answer_well(lab)
    for stage in (False, True):
        gaps = sorted(each.gap_s for each in outcomes if each.blow.stage is stage)
        if gaps:
            what = "with a stage" if stage else "without one"
            print(f"heads {what}: gap {statistics.median(gaps):.2f} s, {gaps[-1]:.2f} at most")
    failed = sum(bool(each.faults) for each in outcomes)
    print(f"{failed} of {len(outcomes)} failed")
    return 1 if failed else 0


def _pairs(options: argparse.Namespace) -> int:
    """Kills the larger of two machines; the exit status."""
    faults: list[str] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        laboratory(Path(scratch), nodes=2, stages=2, memory={"n0": "1GB", "n1": "2GB"}) as lab,
    ):
        expected = head_trials.undisturbed(lab, options.tokens)
        for number in range(options.pairs):
            fault = head_trials.lose_the_larger(lab, number, options.tokens, expected)
            faults.append(fault)
            _write(options.json, faults)
            print(f"{number}: {fault or 'goes on'}", flush=True)
            head_trials.answer_well(lab)
    failed = sum(map(bool, faults))
    print(f"{failed} of {len(faults)} failed")
    return 1 if failed else 0


def _write(file: Path | None, outcomes: object) -> None:
    if file is not None:
        _ = file.write_text(json.dumps(outcomes, indent=1))


def _run(lab: Laboratory, planned: Iterator[Trial], kills: int) -> Iterator[Outcome]:
    """Runs trials until `kills` answers were hit; those that ended before do not count."""
    hit = 0
    for trial in planned:
        outcome = attempt(lab, trial)
        hit += outcome.hit
        _line(outcome)
        yield outcome
        _answer_well(lab)
        if hit >= kills:
            return


def _answer_well(lab: Laboratory) -> None:
    """A good answer between two trials, so that the losses of one do not count against the next."""
    answer = ask(lab.node(lab.head()), "Who are you?")
    assert answer.ended(SILENCE_S) and not answer.error, answer.error


def _line(outcome: Outcome) -> None:
    trial = outcome.trial
    what = f"{trial.name:8} {trial.target:9} {trial.how:14} {trial.phase:8}"
    state = "" if outcome.hit else " (ended before)"
    verdict = "; ".join(outcome.faults) or "as undisturbed"
    first = f", first token after {outcome.next_s:.2f} s" if trial.phase == "prefill" else ""
    numbers = f"gap {outcome.gap_s:5.2f} s{first}, {outcome.resumes} resumed"
    print(f"{what} {numbers}  {verdict}{state}  [{trial.question.name}]", flush=True)


def _report(outcomes: Sequence[Outcome]) -> None:
    print("\n| hit | times | failed | resumed | gap: median, 95 %, max, s | KV freed, max s |")
    print("|---|---|---|---|---|---|")
    hit = [outcome for outcome in outcomes if outcome.hit]
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in hit:
        trial = outcome.trial
        phase = f"phase: {trial.phase}, {'killed' if trial.how == 'kill' else 'stopped'}"
        for name in (f"target: {trial.target}", f"how: {trial.how}", phase):
            groups[name].append(outcome)
    for name, group in sorted(groups.items()):
        print(_row(name, group))
    print(_row("all", hit))
    print(_row("ended before", [o for o in outcomes if not o.hit]))
    failed = [o for o in outcomes if o.faults]
    for outcome in failed:
        seed, number = outcome.trial.name.split("/")
        print(f"--seed {seed} --only {number}: {'; '.join(outcome.faults)}")
    print(f"{len(failed)} of {len(outcomes)} failed")


def _row(name: str, group: Sequence[Outcome]) -> str:
    if not group:
        return f"| {name} | 0 | | | | |"
    gaps = sorted(outcome.gap_s for outcome in group)
    late = gaps[min(len(gaps) - 1, int(0.95 * len(gaps)))]
    failed = sum(bool(outcome.faults) for outcome in group)
    resumed = sum(outcome.resumes for outcome in group)
    freed = max(outcome.freed_s for outcome in group)
    middle = statistics.median(gaps)
    figures = f"{middle:.2f}, {late:.2f}, {gaps[-1]:.2f}"
    return f"| {name} | {len(group)} | {failed} | {resumed} | {figures} | {freed:.1f} |"


if __name__ == "__main__":
    # Ended from outside, it still ends its nodes.
    _ = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
