"""Random kills under answers of three stages with warm spares: are all tokens there, and how late?

    python bench/kills.py [--kills 200] [--seed 1] [--only NUMBER] [--spares 1]

Four real nodes on loopback. Each trial asks a question, kills or stops a runner or a node at a
random moment, and compares the answer's ids with those of an undisturbed one. Ends with status 1
where anything was lost, repeated, too late or held too long.
"""

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from laboratory import Laboratory, laboratory
from listening import SILENCE_S, ask
from trials import Outcome, Trial, attempt, questions, trials


def main() -> int:
    parser = argparse.ArgumentParser(description="Random kills under answers")
    _ = parser.add_argument("--kills", type=int, default=200, help="answers that are hit")
    _ = parser.add_argument("--seed", type=int, default=1)
    _ = parser.add_argument("--only", type=int, help="the number of one trial, to repeat it")
    _ = parser.add_argument("--spares", type=int, default=1, help="warm runners of each stage")
    options = parser.parse_args()
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as scratch,
        laboratory(Path(scratch), spares=options.spares) as lab,
    ):
        asked = [question.asked(lab) for question in questions()]
        made = trials(options.seed, asked)
        if options.only is not None:
            made = islice(made, options.only, options.only + 1)
        outcomes = list(_run(lab, made, options.kills))
        print(f"\nThe first placement took {lab.load_s:.1f} s to load")
        print(f"Stages had to be spread over the nodes anew {lab.collapsed} times")
    _report(outcomes)
    print(f"{time.monotonic() - begun:.0f} s in all, seed {options.seed}")
    return 1 if any(outcome.faults for outcome in outcomes) else 0


def _run(lab: Laboratory, made: Iterator[Trial], kills: int) -> Iterator[Outcome]:
    """Until `kills` answers were hit; those that ended before are made up for."""
    hit = 0
    for trial in made:
        outcome = attempt(lab, trial)
        hit += outcome.hit
        _line(outcome)
        yield outcome
        _vouch(lab)
        if hit >= kills:
            return


def _vouch(lab: Laboratory) -> None:
    """A good answer between two trials, so that the losses of one do not count against the next."""
    answer = ask(lab.node(lab.head()), "Who are you?")
    assert answer.ended(SILENCE_S) and not answer.error, answer.error


def _line(outcome: Outcome) -> None:
    trial = outcome.trial
    what = f"{trial.name:8} {trial.target:9} {trial.how:14} {trial.phase:8}"
    state = "" if outcome.hit else " (ended before)"
    cold = "" if outcome.warm else " (no spare)"
    verdict = "; ".join(outcome.faults) or "as undisturbed"
    first = f", first token after {outcome.next_s:.2f} s" if trial.phase == "prefill" else ""
    numbers = f"gap {outcome.gap_s:5.2f} s{first}, {outcome.resumes} resumed"
    print(f"{what} {numbers}  {verdict}{state}{cold}  [{trial.question.name}]", flush=True)


def _report(outcomes: Sequence[Outcome]) -> None:
    print("\n| hit | times | failed | resumed | gap: median, 95 %, max, s | KV freed, max s |")
    print("|---|---|---|---|---|---|")
    warm = [o for o in outcomes if o.hit and o.warm]
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in warm:
        trial = outcome.trial
        phase = f"phase: {trial.phase}, {'killed' if trial.how == 'kill' else 'stopped'}"
        for name in (f"target: {trial.target}", f"how: {trial.how}", phase):
            groups[name].append(outcome)
    for name, group in sorted(groups.items()):
        print(_row(name, group))
    print(_row("all with a spare ready", warm))
    print(_row("no spare ready", [o for o in outcomes if o.hit and not o.warm]))
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
