"""The rhythm of a node: where its times are, how they hang together, and who is handed them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from exo_node.node.machine.settings import load_settings
from exo_node.node.machine.timing import LAN, LOCAL, PROFILES, Timing

ROOT = Path(__file__).parents[3]
HOME = "node/machine/timing.py"

CONSTANTS = {
    # Bounds on one call to something outside, which nothing else waits by.
    "node/machine/hardware.py": {"_SYSCTL_TIMEOUT_S", "_NVIDIA_TIMEOUT_S"},
    "node/machine/data_dir_lock.py": {"_PAUSE_S"},
    "node/machine/background_reads.py": {"_LIMIT_S"},
    "node/store/hub_download.py": {"_TIMEOUT_S", "_PAUSES_S"},
    "node/rpc/channels.py": {"CALL_TIMEOUT_S"},
    "node/rpc/control_client.py": {"DECIDE_TIMEOUT_S"},
    "node/rpc/link_rpc.py": {
        "_ECHO_LIMIT_S",
        "_TRANSFER_LIMIT_S",
        "_CONNECT_LIMIT_S",
        "_LIMIT_S",
        "_MEASURE_ALL_LIMIT_S",
    },
    "node/runners/runner_client.py": {"ENCODE_TIMEOUT_S"},
    # A setting's default and bounds on values.
    "node/machine/settings.py": {"LOAD_TIMEOUT_S"},
    "node/machine/setting_values.py": {"MAX_SECONDS"},
    "node/links/paths.py": {"_LONGEST_S"},
    "node/placements/planner_view.py": {"NO_TIME_S"},
    "node/runners/load_watch.py": {"SLOWEST_BYTES_S", "FIRST_REPORT_S", "NOTICE_S"},
    # Buckets of histograms.
    "node/chat/metrics.py": {"_FIRST_TOKEN_S", "_EACH_TOKEN_S", "_ANSWER_S"},
    # Lifetimes of credentials and limits against abuse, which no profile may loosen.
    "node/trust/local_token.py": {"TICKET_S"},
    "node/trust/api_tokens.py": {"_USE_S"},
    "node/trust/token_file.py": {"_LOCK_PAUSE_S"},
    "node/join/requests.py": {"REFILL_S", "REFILL_OF_ONE_S"},
    "node/api/guard.py": {"BODY_TIMEOUT_S"},
    "node/machine/open_files.py": {"LOG_EVERY_S"},
    "node/runners/supervisor.py": {"STRAY_PERIOD_S"},
    # A command's own patience with the node that it asks.
    "node/cli/client.py": {"_CONNECT_TIMEOUT_S", "_READ_TIMEOUT_S"},
    "node/cli/start.py": {"_TIMEOUT_S", "_POLL_S", "_LOOK_S"},
    "node/cli/join.py": {"_APPROVE_S", "_REKEY_S"},
    "node/cli/bench.py": {"_MEASURE_LIMIT_S"},
    "node/cli/child.py": {"END_S"},
    "node/cli/doctor.py": {"_DIAL_S", "_SILENT_S", "_CLOCKS_S"},
    "node/cli/service.py": {"_WITHIN_S", "_STOP_S"},
    "node/cli/top.py": {"_EVERY_S"},
    "node/cli/get_models.py": {"_LINE_EVERY_S", "_DRAWN_EVERY_S"},
    # What browsers are told.
    "node/api/origins.py": {"_PREFLIGHT_S"},
}
"""Times that stay with their module, by the rule in timing.py's docstring. Keep it short."""

_TIME = re.compile(r"_?[A-Z][A-Z0-9_]*_(S|MS|SECONDS|MINUTES|HOURS)|MAX_SECONDS")


def constants(source: str) -> Iterator[str]:
    """Module-level names that are times by their name."""
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=targets):
                pass
            case ast.AnnAssign(target=target):
                targets = [target]
            case _:
                continue
        names = {each.id for t in targets for each in ast.walk(t) if isinstance(each, ast.Name)}
        yield from (name for name in names if _TIME.fullmatch(name))


def test_times_of_the_node_are_in_one_place() -> None:
    sources = [f for f in (ROOT / "node").rglob("*.py") if f != ROOT / HOME]
    found = {
        str(file.relative_to(ROOT)): names
        for file in sources
        if (names := set(constants(file.read_text())))
    }
    assert found == CONSTANTS


@pytest.mark.parametrize(
    "source", ["WAIT_S = 1.0", "_WAIT_S: Final = 1", "A, LOOK_S = 1, 2.0", "PAUSE_MS = A_S = 3"]
)
def test_a_seeded_constant_is_seen(source: str) -> None:
    assert list(constants(source))


def test_no_part_of_the_node_names_a_profile() -> None:
    """Parts are handed theirs by the root; the process's loop and the commands choose as well."""
    users = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "node").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
        and node.module is not None
        and node.module.endswith("timing")
        and {alias.name for alias in node.names} & {"LAN", "LOCAL", "PROFILES"}
    }
    assert users == {"node/local_node.py", "node/run.py", "node/placements/local_model.py"}


def described(timing: Timing) -> dict[str, float]:
    """Every value of a profile, the derived ones too, by group and name."""
    found: dict[str, float] = {}
    for group in fields(timing):
        part = getattr(timing, group.name)
        assert is_dataclass(part)
        for name in dir(type(part)):
            if not name.startswith("_"):
                found[f"{group.name}.{name}"] = getattr(part, name)
    return found


def test_the_lan_profile_has_the_values_that_were_measured_and_documented() -> None:
    """Each is justified where it stands; none changes by the way."""
    lan = described(LAN)
    beat = {
        "heartbeat_s": 1.0, "tick_s": 0.25, "exchange_timeout_s": 1.0, "doubt_after_s": 1.0,
        "suspect_after_s": 1.5, "dead_after_s": 3.5, "refused_dead_after_s": 1.25,
        "refused_again_s": 0.2, "late_after_s": 1.0, "forget_after_s": 60.0, "lease_s": 3.5,
        "waking_s": 1.5, "patience_s": 3.0, "stagger_s": 4.0, "clearly_s": 5.0, "election_s": 6.0,
        "head_wait_s": 1.0, "quick_try_s": 0.25, "max_backoff_s": 10.0,
        "known_backoff_s": 3.0, "report_timeout_s": 2.0,
    }  # fmt: skip
    assert {k.partition(".")[2]: v for k, v in lan.items() if k.startswith("cluster.")} == beat
    assert lan["join.silence_s"] == 10.0 and lan["join.too_many_s"] == 15.0
    assert lan["placements.paused_s"] == 3.0 and lan["runners.silence_s"] == 10.0


@pytest.mark.parametrize("timing", PROFILES.values(), ids=PROFILES)
def test_the_rhythm_hangs_together(timing: Timing) -> None:
    c, j, p = timing.cluster, timing.join, timing.placements
    assert c.tick_s <= c.heartbeat_s / 2, "a gap beyond a heartbeat is this node's own pause"
    assert c.doubt_after_s < c.refused_dead_after_s < c.suspect_after_s < c.dead_after_s
    assert c.stagger_s > c.dead_after_s, "the next node waits until the one before it is dead"
    assert c.dead_after_s < c.election_s <= timing.chat.fresh_within_s
    assert c.max_backoff_s >= c.known_backoff_s >= c.heartbeat_s
    assert c.forget_after_s > c.dead_after_s
    assert j.waiting_every_s < j.silence_s and j.retry_s <= j.max_retry_s
    assert j.fresh_s > c.dead_after_s, "a node that is dead by then is not asked"
    assert p.watch_s < p.paused_s and p.orphan_s > p.stage_grace_s >= 3 * c.heartbeat_s
    assert timing.loops.first_wait_s <= timing.loops.max_wait_s
    assert all(value > 0 for value in described(timing).values())


def test_the_local_profile_suspects_nobody_sooner() -> None:
    """Nodes of one machine share its cores: a loaded one pauses them for seconds."""
    lan, local = described(LAN), described(LOCAL)
    changed = {name for name in lan if lan[name] != local[name]}
    assert changed == {
        "cluster.max_backoff_s", "cluster.known_backoff_s", "join.retry_s", "join.max_retry_s",
        "join.too_many_s", "join.look_again_s", "join.look_at_peer_s", "join.watch_s",
        "placements.refill_after_s", "serving.drain_s",
    }  # fmt: skip
    assert {name for name in changed if local[name] > lan[name]} == {"serving.drain_s"}


def test_the_profile_is_a_setting() -> None:
    assert load_settings({}, {}).timing == "lan"
    assert PROFILES[load_settings({}, {"EXO_TIMING": "local"}).timing] is LOCAL
