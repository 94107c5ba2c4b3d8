"""The nodes' timing; chance that is the same in every run; the longest files first; profiles."""

import gc
import os
import random
from collections.abc import Generator, Iterator
from typing import Any

import as_runners  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import fused_headers
import hypothesis
import kept_profiles
import mlx.core as mx
import pytest
from costs import (
    pytest_addoption,
    pytest_runtest_protocol,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from loops import TestLoop

__all__ = [  # hooks
    "pytest_addoption",
    "pytest_runtest_protocol",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_testnodedown",
]

_ = os.environ.setdefault("EXO_TIMING", "local")  # of every node that a test starts
fused_headers.use()

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


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """`async def` tests run on asyncio, as the node does."""
    return "asyncio", {"loop_factory": TestLoop}


LONGEST_FIRST = (
    "test_kills",
    "test_head_answers",
    "test_node",
    "test_cluster",
    "test_namespaces",
    "test_bad_input",
    "test_join_nodes",
    "test_pull",
    "test_model_classes",
    "test_batching",
    "test_memory_nodes",
    "test_distribution",
    "test_load_watch",
    "test_serve_runs",
    "test_engine",
    "test_kernels",
    "test_links",
    "test_long_runs",
    "test_dialects",
    "test_page",
    "test_page_cluster",
    "test_page_places",
    "test_structured",
    "test_rebuild_together",
    "test_families",
    "test_profiling",
    "test_runner",
    "test_verify",
    "test_installed_texts",
    "test_join_wire",
    "test_kv_quantisation",
    "test_kernel_texts",
    "test_head_change",
    "test_discovery",
    "test_convert",
    "test_following_whole",
    "test_identity_matrix",
    "test_strict",
    "test_prefix_cache",
    "test_garbage_heads",
    "test_prompt_encoder",
    "test_standby",
    "test_layer_timer",
    "test_cli",
    "test_drafted_answers",
    "test_resume_exact",
    "test_self_check",
    "test_batch_probe",
    "test_model_list",
    "test_disk_trouble",
    "test_graft",
    "test_model_copies",
    "test_prefix_disk",
    "test_failures",
    "test_accept",
    "test_node_telemetry",
    "test_bench_mtp",
    "test_pipeline",
    "test_real_layouts",
    "test_attention_texts",
    "test_fused_texts",
    "test_plan_exact",
    "test_merged",
    "test_events",
    "test_prefill_memory",
    "test_sampling",
)
"""Of those that take ten seconds or more; a file that is missing here costs a little time only."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Half as many again as there are cores for this process: for much of their time tests wait for
    other processes, as for nodes that elect a head."""
    return max(2, _cores() * 3 // 2)


def _cores() -> int:
    """Those that a container or `taskset` leaves, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole files move; each file's tests keep their order."""
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All that is imported and collected stays: the garbage collector is not to look at it, then or
    later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def shared_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder for all processes of the session."""
    base = tmp_path_factory.getbasetemp()
    kept_profiles.share((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "profiles")
    yield
    kept_profiles.share(None)
