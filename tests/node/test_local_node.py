"""Facts that a node sends about itself, as its settings make them."""

from pathlib import Path

import pytest

from exo_node.node.local_node import LocalNode
from exo_node.node.machine.hardware import detect_hardware
from exo_node.node.machine.settings import installed_distributions, load_settings


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("EXO_OFFLINE", "1", ("", True, True, 0)),
        ("EXO_NATIVE_MTP_ENABLED", "0", ("0", True, True, 0)),
        ("EXO_NATIVE_MTP_ENABLED", "1", ("1", True, True, 0)),
        ("EXO_NATIVE_MTP_ASYNC_DRAFT_EVAL", "0", ("", False, True, 0)),
        ("EXO_NATIVE_MTP_ADAPTIVE", "0", ("", True, False, 0)),
        ("EXO_NATIVE_MTP_DEFAULT_K", "2", ("", True, True, 2)),
    ],
)
def test_each_switch_changes_the_fact_that_it_names_and_no_other(
    variable: str, value: str, expected: tuple[str, bool, bool, int], tmp_path: Path
) -> None:
    settings = load_settings({"data_dir": str(tmp_path)}, {variable: value})
    hardware = detect_hardware(installed_distributions(), 2 * 10**9)
    facts = LocalNode(settings, hardware).facts()
    message = (
        facts.native_mtp_variable,
        facts.async_draft_eval,
        facts.adaptive_draft,
        facts.default_draft_tokens,
    )
    assert message == expected
