"""The times of a node: where they are defined, how they depend on each other, and who uses them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from exo_node.node.machine.settings import load_settings
from exo_node.node.machine.timing import LAN, LOCAL, PROFILES, Timing

ROOT = Path(__file__).parents[3]
HOME = "node/machine/timing.py"

CONSTANTS = {
    # Timeouts of one call outside the cluster, or of a measurement, and a protocol's own time.
    "node/machine/awake.py": {"_END_S", "_LINGER_S", "_LOOK_EVERY_S", "_SLEPT_S", "_SOON_S"},
    "node/machine/local_network.py": {"_LOOK_EVERY_S"},
    "node/machine/hardware.py": {"_COMMAND_TIMEOUT_S"},
    "node/machine/private_files.py": {"_PAUSE_S"},
    "node/machine/background_reads.py": {"_LIMIT_S"},
    "node/store/hub_download.py": {"_TIMEOUT_S", "_CONNECT_TIMEOUT_S", "_PAUSES_S"},
    "node/store/hub_client.py": {"_LIST_S"},
    "node/node_models.py": {"_SEARCH_S"},
    "node/store/pulls.py": {"_STALLED_S"},
    "node/rpc/control_client.py": {"DECIDE_TIMEOUT_S"},
    "node/rpc/link_rpc.py": {"_PART_LIMIT_S", "_CONNECT_LIMIT_S", "_LIMIT_S"},
    "node/cluster/discovery.py": {"_ASK_AGAIN_S"},
    # A setting's default and bounds on values.
    "node/machine/settings.py": {"LOAD_TIMEOUT_S"},
    "node/machine/setting_values.py": {"MAX_SECONDS"},
    "node/links/layer_profiles.py": {"_SHORTEST_S", "_LONGEST_S"},
    "node/links/paths.py": {"_LONGEST_S"},
    "node/placements/planner_view.py": {"NO_TIME_S", "SHORTEST_S"},
    "node/runners/load_watch.py": {"SLOWEST_BYTES_S", "FIRST_REPORT_S", "NOTICE_S"},
    # Buckets of histograms.
    "node/chat/metrics.py": {"_FIRST_TOKEN_S", "_EACH_TOKEN_S", "_ANSWER_S"},
    # Lifetimes of credentials and limits against abuse, which no profile may loosen.
    "node/trust/local_token.py": {"TICKET_S"},
    "node/trust/api_tokens.py": {"_USE_S"},
    "node/join/requests.py": {"REFILL_S", "REFILL_OF_ONE_S"},
    "node/api/http/guard.py": {"BODY_TIMEOUT_S"},
    "node/machine/open_files.py": {"LOG_EVERY_S"},
    "node/runners/runner_log.py": {"STRAY_PERIOD_S", "LAST_WORDS_S"},
    # The lifetime of a preflight in a browser's cache.
    "node/api/http/origins.py": {"_PREFLIGHT_S"},
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
    constants_by_file = {
        str(file.relative_to(ROOT)): names
        for file in sources
        if (names := set(constants(file.read_text())))
    }
    assert constants_by_file == CONSTANTS


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


def times(timing: Timing) -> dict[str, float]:
    """Every value of a profile, the derived ones too, by name."""
    names = (name for name in dir(Timing) if not name.startswith("_"))
    return {name: getattr(timing, name) for name in names}


def test_the_base_values_are_few() -> None:
    assert len(fields(Timing)) <= 15


def test_the_lan_profile_has_the_values_that_were_measured_and_documented() -> None:
    assert times(LAN) == {
        "heartbeat_s": 1.0, "tick_s": 0.25, "reply_s": 5.0, "keep_alive_s": 2.0, "stall_s": 30.0,
        "drain_s": 30.0, "retry_s": 1.0, "max_retry_s": 10.0,
        "max_pause_s": 60.0, "forget_after_s": 60.0, "refresh_s": 300.0,
        "doubt_after_s": 1.0, "refused_dead_after_s": 1.25, "suspect_after_s": 1.5,
        "dead_after_s": 3.5, "refused_again_s": 0.2, "lease_s": 3.5, "waking_s": 1.5,
        "patience_s": 3.0, "stagger_s": 4.0, "election_s": 6.0, "clearly_s": 5.0,
        "known_backoff_s": 3.0, "report_timeout_s": 2.0,
        "watch_s": 1.0, "silence_s": 10.0, "silent_ticks": 10, "steady_s": 10.0, "quiet_s": 0.5,
        "ping_s": 4.0, "rescan_s": 30.0, "overdue_s": 60.0, "scan_s": 5.0,
        "claim_grace_s": 1.0, "takeover_s": 5.0, "state_lease_s": 10, "crowded_after_s": 10.0,
        "move_gain_s": 0.5,
        "refill_every_s": 10.0, "settle_after_s": 120.0, "failures_within_s": 600.0,
        "look_again_s": 3.0, "grace_s": 10, "events_keep_alive_s": 15.0,
        "digest_timeout_s": 1800.0, "slow_reply_s": 10.0, "long_reply_s": 60.0,
    }  # fmt: skip


@pytest.mark.parametrize("timing", PROFILES.values(), ids=PROFILES)
def test_the_times_of_a_profile_fit_together(timing: Timing) -> None:
    t = timing
    assert t.tick_s <= t.heartbeat_s / 2, "a gap beyond a heartbeat is this node's own pause"
    assert t.refused_again_s < t.tick_s, "a quick try after a refusal counts as a second one"
    assert t.doubt_after_s < t.refused_dead_after_s < t.suspect_after_s < t.dead_after_s
    assert t.stagger_s > t.dead_after_s, "the next node waits until the one before it is dead"
    assert t.dead_after_s < t.election_s
    assert t.max_retry_s >= t.known_backoff_s >= t.heartbeat_s
    assert t.forget_after_s > t.dead_after_s
    assert t.keep_alive_s < t.silence_s and t.retry_s <= t.max_retry_s
    assert t.silence_s > t.dead_after_s, "a node that is dead by then is not probed"
    assert t.refill_every_s > t.dead_after_s, "a node that did not answer a load is dead by then"
    assert t.watch_s < t.lease_s and t.takeover_s > t.patience_s >= 3 * t.heartbeat_s
    assert all(value > 0 for value in times(timing).values())


def test_the_local_profile_suspects_no_node_sooner() -> None:
    """Nodes of one machine share its cores: a loaded one pauses them for seconds."""
    lan, local = times(LAN), times(LOCAL)
    assert {name: local[name] for name in lan if lan[name] != local[name]} == {
        "retry_s": 0.25, "max_retry_s": 2.0, "drain_s": 180.0,
        "known_backoff_s": 1.0, "look_again_s": 0.75,
    }  # fmt: skip


def test_the_profile_is_a_setting() -> None:
    assert load_settings({}, {}).timing == "lan"
    assert PROFILES[load_settings({}, {"EXO_TIMING": "local"}).timing] is LOCAL
