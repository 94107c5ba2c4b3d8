"""The nodes' timing; chance that is the same in every run; the longest files first; profiles."""

import os
import random
from collections.abc import Iterator

import hypothesis
import kept_profiles
import mlx.core as mx
import pytest

_ = os.environ.setdefault("EXO_TIMING", "local")  # of every node that a test starts

hypothesis.settings.register_profile(
    "steady",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "search", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("steady")
"""The same examples in every run; `--hypothesis-profile=search` looks for others."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before the fixtures of any scope: what a test draws depends neither on a clock nor on which
    tests ran before it."""
    random.seed(0)
    mx.random.seed(0)


LONGEST_FIRST = (
    "test_kills",
    "test_head_answers",
    "test_cluster",
    "test_join_nodes",
    "test_engine",
    "test_prefix_cache",
    "test_long_runs",
    "test_node",
    "test_distribution",
    "test_links",
    "test_runner",
    "test_resume_exact",
    "test_bench_mtp",
    "test_layer_timer",
    "test_namespaces",
    "test_model_classes",
    "test_following",
    "test_load_watch",
    "test_prompt_encoder",
    "test_verify",
    "test_profiling",
    "test_head_change",
    "test_pitfalls",
    "test_engine_modes",
    "test_numeric",
    "test_families",
    "test_garbage_heads",
    "test_identity_matrix",
    "test_pipeline",
    "test_strict",
    "test_bad_input",
    "test_standby",
    "test_node_telemetry",
)
"""Of those that take ten seconds or more; a file that is missing here costs a little time only."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole files move; each file's tests keep their order."""
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="session", autouse=True)
def shared_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder for all processes of the session."""
    base = tmp_path_factory.getbasetemp()
    kept_profiles.share((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "profiles")
    yield
    kept_profiles.share(None)
