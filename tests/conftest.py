"""The order of files: the longest first, so that no core idles at the end while another has one."""

import pytest

LONGEST_FIRST = (
    "test_kills",
    "test_join_nodes",
    "test_cluster",
    "test_verify",
    "test_bench_mtp",
    "test_long_runs",
    "test_head_change",
    "test_pitfalls",
    "test_node",
    "test_distribution",
    "test_namespaces",
    "test_profiling",
    "test_links",
    "test_engine",
    "test_resume_exact",
    "test_runner",
    "test_engine_modes",
    "test_strict",
)
"""Of those that take ten seconds or more; a file that is missing here costs a little time only."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole files move; each file's tests keep their order."""
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
