"""A runner's log as its node reads it."""

import logging
import re

from exo_node.node.runners.runner_log import _LINE  # pyright: ignore[reportPrivateUsage]
from exo_node.shard.runner.main import RunnerLog


def test_each_line_of_a_traceback_is_known_for_the_runners_own() -> None:
    """The node limits other lines: the last one, which names the fault, was left out."""
    record = logging.LogRecord("a.b", logging.ERROR, "f", 1, "it failed", None, None)
    try:
        [].index(7)  # pyright: ignore[reportUnknownMemberType]
    except ValueError as fault:
        record.exc_info = (ValueError, fault, fault.__traceback__)
    lines = RunnerLog("%(levelname)s:%(name)s:%(message)s").format(record).splitlines()
    matches = [re.fullmatch(_LINE, line) for line in lines]
    assert all(match is not None and match[2] == "a.b" for match in matches)
    assert matches[0] is not None and matches[0][3] == "it failed"
    assert lines[-1].endswith("ValueError: 7 is not in list")
