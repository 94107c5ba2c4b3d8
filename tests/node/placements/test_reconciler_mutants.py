"""Each rule of the reconciler is needed: without it, a row of the table fails."""

import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from small_planner import text
from test_reconcile import CASES, NOW

from exo_node.node.placements import reconcile as original
from exo_node.node.placements.state import Action

FOLDER = Path(str(original.__file__)).parent
PACKAGE = "exo_node.node.placements"
MUTANTS: Sequence[tuple[str, str, str, str]] = [
    ("a new head waits for nobody", "reconcile",
     "if any(node.heard_at < view.leads_since for node in observed.nodes):", "if False:"),
    ("a failure is forgotten where nothing wants the model", "reconcile",
     "is not None and mark.no_room:", "is not None:"),
    ("want of room is remembered", "reconcile",
     "is not None and mark.no_room:", "is not None and False:"),
    ("what hangs is not killed", "reconcile",
     "if runner.silent and runner.key.node in here.live:", "if False:"),
    ("stale bounds stay", "reconcile",
     "if here.is_stale(placement, desired):", "if False:"),
    ("a missing draft head stays missing", "reconcile",
     "here.view.lacks_head(placement.plan, generator)", "False"),
    ("connections in flight are repeated", "reconcile",
     "if placement.id in here.observed.busy:", "if False:"),
    ("a broken answer changes nothing", "reconcile",
     "if not placement.connected or broken:", "if not placement.connected:"),
    ("a broken answer of a whole model connects it again", "reconcile",
     "== placement.epoch and len(placement.plan) > 1", "== placement.epoch"),
    ("a lost stage waits for ever where it has no room", "reconcile",
     'here.replan(placement, f"no live node has room for its stage {stage}")', "pass"),
    ("a node may hold one stage twice", "reconcile",
     "barred = holders |", "barred = set[NodeId]() |"),
    ("lost stages go to excluded nodes", "reconcile",
     "here.doubtful() | desired.options.exclude", "here.doubtful()"),
    ("silent nodes are tried again at once", "situation",
     "and self.now - f.at < self.timing.refill_every_s", "and False"),
    ("a node that came back is not used", "situation",
     "and not (f.node in self.nodes and self.nodes[f.node].alive_since > f.at)", ""),
    ("a placement is moved to a silent node", "replicas",
     "replica_nodes(here, desired, placement) | here.doubtful()",
     "replica_nodes(here, desired, placement)"),
    ("replicas share nodes", "replicas",
     "barred = replica_nodes(here, desired, placement) |", "barred ="),
    ("a replica takes a lost stage onto another one's node", "reconcile",
     "barred |= replica_nodes(here, desired, placement)", "pass"),
    ("a lost stage goes where a GPU fault has shortened the chunk", "reconcile",
     "barred |= here.view.short_of_chunk(placement.plan)", "pass"),
    ("a replica is loaded before the first placement serves", "replicas",
     "or not serves:", "or not replicas:"),
    ("a replica is tried in every pass", "replicas",
     "if here.now - max(failed, default=-inf) < here.timing.refill_every_s:", "if False:"),
    ("replicas never give way", "room",
     "if pair[0].stay_s == inf and _is_last(here, *pair):",
     "if pair[0].stay_s == inf:"),
    ("a model goes with its replica", "room",
     "        if _is_last(here, each, placement):", "        if True:"),
    ("a stage goes to a node of the placement first", "reconcile",
     "(node in avoided, node in busy, -unused, node)", "(node in avoided, -unused, node)"),
    ("leaving nodes keep their stages", "reconcile",
     "if node not in here.draining or placement.successors(stage, here.draining):",
     "if True:"),
    ("moves off leaving nodes are repeated", "reconcile",
     "if node not in here.draining or placement.successors(stage, here.draining):",
     "if node not in here.draining:"),
    ("leaving stages change over one by one", "situation",
     "if incoming.keys() == leaving:", "if incoming:"),
    ("nothing moves back", "reconcile",
     "elif planned.plan.score <= WORTHWHILE * present:", "elif False:"),
    ("placements move for nothing", "reconcile", "WORTHWHILE = 0.9", "WORTHWHILE = 1.0"),
    ("fewer nodes than requested are for good", "reconcile",
     "if not bounds.allows(placement.nodes) and bounds.allows(planned.nodes):", "if False:"),
    ("placements move under answers", "situation",
     "return 0.0 if self.is_used(placement) else self.now - used_at",
     "return self.now - used_at"),
    ("placements move at once", "reconcile",
     "here.idle_s(desired, placement) >= here.timing.settle_after_s",
     "not here.is_used(placement)"),
    ("a moment's suspicion moves a model", "reconcile", "if present == inf or not", "if not"),
    ("an explicit request moves nothing back", "reconcile",
     "requested = here.is_requested_since(desired, placement)", "requested = False"),
    ("what was never displaced moves", "reconcile",
     "placement.connected and placement.displaced and (idle", "placement.connected and (idle"),
    ("stages that share a node stay", "reconcile",
     "if not (idle and placement.connected and _may_spread(here, desired, placement)):",
     "if True:"),
    ("stages move apart under answers", "reconcile",
     "idle = here.idle_s(desired, placement) >= here.timing.refill_every_s", "idle = True"),
    ("stages move to nodes that just failed", "reconcile",
     "if n not in barred and here.is_steady(n)}", "if n not in barred}"),
    ("stages move with a flapping node", "situation",
     "gap_s * 2.0 ** max(0, count - 1))", "gap_s)"),
    ("each call of one failure counts", "situation",
     "count = sum(later - at >= gap_s for at, later in pairwise([-inf, *times]))",
     "count = len(times)"),
    ("placements move to nodes that just failed", "reconcile",
     "if present == inf or not (requested or all(map(here.is_steady, planned.nodes))):",
     "if present == inf:"),
    ("a node that has just returned gets a stage", "situation",
     "max(self.nodes[node].alive_since, *times[-1:], -inf)", "max(*times[-1:], -inf, -inf)"),
    ("stages move to any node first", "reconcile",
     "for able in ({n: size for n, size in free.items() if n == planned}, free):",
     "for able in (free,):"),
    ("a stage that loads is connected", "reconcile",
     'if incoming[0].state == "ready":', "if True:"),
    ("stages move apart while a model waits for room", "reconcile",
     "not (desired.removed or others or leaving)", "not (desired.removed or leaving)"),
    ("what was loaded to part two stages is unloaded", "reconcile",
     "if not is_needed and stage in placement.crowded[:1]:", "if False:"),
    ("answers on what is replaced are never cut", "reconcile",
     "overdue = is_needed and not desired.removed and retired_s >= here.timing.drain_s",
     "overdue = False"),
    ("answers on what is replaced are cut before its successor is loaded", "reconcile",
     "if replicas and not any(each.connected for each in replicas):", "if False:"),
    ("answers on what is replaced are cut at once", "reconcile",
     "retired_s >= here.timing.drain_s", "retired_s >= 0"),
    ("runners are unloaded under answers", "reconcile",
     "if here.in_use(runner, placement) and not overdue:", "if False:"),
    ("former owners go before their successors are connected", "reconcile",
     "if stays and not placement.connected and runner.epoch in complete:", "if False:"),
    ("former stages wait for answers that lead nowhere", "reconcile",
     "kill=stays and fenced and len(placement.plan) > 1", "kill=False"),
    ("runners of another head are unloaded at once", "reconcile",
     "here.now - known_since >= here.timing.takeover_s", "True"),
    ("runners of nodes that follow another head are unloaded", "reconcile",
     "node.follows and ", ""),
    ("successors are unloaded", "reconcile",
     "if _is_next_owner(here, desired, placement, runner):", "if False:"),
    ("surplus runners stay", "reconcile",
     "return is_needed and runner.key in", "return runner.key in"),
    ("replicas follow answers at once", "replicas",
     "if here.now - crowded_since >= here.timing.crowded_after_s:", "if crowded_since < inf:"),
    ("replicas grow without room", "replicas",
     "if count < MAX_REPLICAS and not isinstance(planned_replica(here, desired), ExoNodeError):",
     "if count < MAX_REPLICAS:"),
    ("one crowded replica of two is enough", "replicas",
     "crowded_since = max(", "crowded_since = min("),
    ("replicas go at once", "replicas",
     "here.now - idle_since >= here.timing.settle_after_s", "idle_since < inf"),
    ("the last replica goes", "replicas", "is_quiet and count > 1 and", "is_quiet and"),
    ("a replica goes and comes back", "replicas", "is_quiet and count > 1 and", "count > 1 and"),
    ("a requested number follows the answers", "replicas",
     "if not desired.auto_replicas or desired.removed or not is_settled:",
     "if desired.removed or not is_settled:"),
    ("several replicas are added at once", "replicas",
     "is_settled = len(replicas) == desired.replicas and", "is_settled ="),
    ("what was given up is tried in every pass", "reconcile",
     "if mark is not None and not mark.no_room:", "if False:"),
    ("failed loads are never told", "reconcile",
     "if files or (in_vain and here.now < until):", "if files:"),
    ("broken files are tried again", "reconcile",
     "if files or (in_vain", "if (in_vain"),
    ("there are no pauses", "reconcile",
     'return "yes" if here.now >= until or elsewhere else "elsewhere"', 'return "yes"'),
    ("a pause holds on all nodes", "reconcile",
     'return "yes" if here.now >= until or elsewhere else "elsewhere"',
     'return "yes" if here.now >= until or elsewhere else "no"'),
    ("a pause holds on no node", "situation",
     "if self.now < at + self.pause_s(desired, node=n)", "if False"),
    ("in a pause a stage goes to a node with others", "reconcile",
     "barred = {*here.paused(desired), *placement.nodes}", "barred = here.paused(desired)"),
    ("a first load waits before another node is tried", "reconcile",
     "if here.now >= until or elsewhere else", "if here.now >= until else"),
    ("marks outlive what they are about", "reconcile",
     "here.actions.append(Retry(desired.model))\n    here.place", "pass\n    here.place"),
    ("a model is planned while its runners end", "reconcile",
     "if any(r.plan.model == model and r.key.node in here.live for r in here.ending()):",
     "if False:"),
    ("models that load at once share memory", "situation",
     "self.free[action.key.node] -= action.plan.promised(action.key.stage)", "pass"),
    ("all models take what they like", "reconcile", "frugal=len(unplaced) > 1", "frugal=False"),
    ("the first in the alphabet comes first", "situation",
     "since = self.observed.waiting.get(desired.model, inf)", "since = 0.0"),
    ("good answers clear nothing", "situation",
     "self.observed.answered_at.get(desired.model, -inf),", "-inf,"),
    ("failures are remembered for ever", "situation",
     "self.now - self.timing.failures_within_s,", "-inf,"),
    ("pauses grow without an end", "situation",
     "min(self.timing.max_pause_s, 2.0 ** (most - 2))", "2.0 ** (most - 2)"),
    ("a model in use is not wanted", "situation",
     "if any(self.is_used(placement) for placement in self.placements[desired.model]):",
     "if False:"),
    ("models stay for ever", "situation",
     "return self.now - desired.used_at < stay_s", "return True"),
    ("a model goes right after it was given to a request", "situation",
     "stay_s = max(desired.stay_s, self.timing.claim_grace_s)",
     "stay_s = desired.stay_s"),
    ("models that stay for ever give way", "room",
     "if pair[0].stay_s == inf and _is_last(here, *pair):", "if False:"),
    ("models that answer give way", "room", "and not here.is_used(placement)", ""),
    ("models that were just used give way", "room",
     "and here.now - each.used_at >= here.timing.claim_grace_s", ""),
    ("more models give way than it takes", "room",
     "if _fits(here, desired, _without_all(here, free, fewer)):", "if False:"),
    ("models give way in vain", "room",
     "if _fits(here, desired, _without_all(here, free, chosen)):\n            break", "break"),
    ("evicted models come back at once", "room",
     "here.actions.append(Release(each.model))", "pass"),
    ("nothing shrinks", "room",
     "or _shrink(here, desired, free)", ""),
    ("what has nothing to give is loaded again", "room",
     "sum(planned.memory) < sum(placement.plan.memory)", "True"),
    ("memory that is waited for is given away", "room",
     "here.reserve(planned)  # no other model takes what it waits for", "pass"),
    ("requests without room wait for ever", "room",
     "if waits or desired.model not in here.observed.given_up:", "if False:"),
    ("the older epoch owns a stage", "situation",
     "complete = max(complete_epochs(runners), default=None)",
     "complete = min(complete_epochs(runners), default=None)"),
    ("an incomplete epoch owns a stage", "situation",
     "return runner.epoch == complete, runner.state", "return True, runner.state"),
]  # fmt: skip


def mutated(
    monkeypatch: pytest.MonkeyPatch, file: str, before: str, after: str
) -> Callable[..., list[Action]]:
    """`reconcile` with one piece of text replaced."""
    for name in ("situation", "room", "replicas", "reconcile"):
        source = (FOLDER / f"{name}.py").read_text()
        if name == file:
            assert source.count(before) == 1, (
                f"{before!r} stands there {source.count(before)} times"
            )
            source = source.replace(before, after)
        module = types.ModuleType(f"{PACKAGE}.{name}")
        module.__package__ = PACKAGE
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    mutant: Any = sys.modules[f"{PACKAGE}.reconcile"]
    return mutant.reconcile


def fails(reconcile: Callable[..., list[Action]]) -> bool:
    """Whether a row of the table does."""
    for case in CASES:
        try:
            actions = reconcile(case.desired, case.observed(), case.view(), NOW)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return True
        if [text(action) for action in actions] != list(case.actions):
            return True
    return False


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant[0])
def test_without_a_rule_a_row_fails(
    monkeypatch: pytest.MonkeyPatch, mutant: tuple[str, str, str, str]
) -> None:
    _, file, before, after = mutant
    assert fails(mutated(monkeypatch, file, before, after))


def test_the_table_holds_with_all_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    same = "frugal=len(unplaced) > 1"
    assert not fails(mutated(monkeypatch, "reconcile", same, same))
