"""Hooks of the whole suite: timing of nodes, seeds, parts of the suite, shared measurements."""

import functools
import gc
import itertools
import os
import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
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

TESTS = Path(__file__).parent

_ = os.environ.setdefault("EXO_TIMING", "local")  # of every node that a test starts
_BIN = str(Path(sys.executable).parent)  # so that texts call the program exo-node
os.environ["PATH"] = os.pathsep.join([_BIN, os.environ.get("PATH", os.defpath)])
fused_headers.use()
if sys.platform == "darwin":  # where MLX would choose Metal; what tests expect is of a CPU
    mx.set_default_device(mx.cpu)

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
hypothesis.settings.register_profile(
    "unshrunk",
    hypothesis.settings.get_profile("steady"),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("steady")
"""The same examples in every run; `--hypothesis-profile=search` looks for others, and `unshrunk`
ends at the first that fails."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seeds before all fixtures, so that random draws depend on no clock and no other test."""
    random.seed(0)
    mx.random.seed(0)


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """`async def` tests run on asyncio, as the node does; on one loop with a module's fixtures."""
    return "asyncio", {"loop_factory": TestLoop}


SLOW_FILES = {
    "cluster": (
        "processes/test_namespaces",
        "processes/test_gpu_faults",
        "processes/test_prefix_move",
        "processes/test_head_answers",
        "processes/test_sleep",
        "processes/test_kills",
        "processes/test_shared_node",
        "processes/test_join_nodes",
        "processes/test_node",
        "processes/test_measuring",
        "processes/test_cluster",
        "processes/test_dialects",
        "processes/test_choices",
        "processes/test_pull",
        "processes/test_model_files",
        "processes/test_download_trouble",
        "processes/test_profiling",
        "processes/test_links",
        "processes/test_runner",
        "processes/test_runner_on_chips",
        "processes/test_split_copies",
        "processes/test_hostile_images",
        "processes/test_image_runners",
        "processes/test_embeddings",
        "processes/test_head_change",
        "bench/serve/test_serve",
        "processes/test_bench_serve",
        "node/cli/test_cli",
        "node/cli/test_failures",
        "node/cli/test_launch",
        "processes/test_bad_input",
        "processes/test_graft",
        "processes/test_import",
        "processes/test_real_weights",
        "processes/test_required_calls",
        "processes/test_launch_node",
        "lab/test_coding_tools",
        "processes/test_loop_guard",
        "processes/test_placed_drafters",
        "shard/engine/test_draft_pairs",
        "processes/test_placed_kv_bits",
        "processes/test_model_list",
        "processes/test_model_copies",
        "processes/test_load_watch",
        "processes/test_memory_nodes",
        "processes/test_open_files",
        "processes/test_runner_addresses",
        "processes/test_disk_trouble",
        "processes/test_join_flood",
        "processes/test_flood",
        "processes/test_replicas",
        "processes/test_readers",
        "processes/test_chunk",
        "processes/test_continued_responses",
        "processes/test_node_telemetry",
        "processes/test_proxies",
        "processes/test_terminal",
        "node/placements/test_random_faults",
    ),
    "models": (
        "mtp/test_qwen4",
        "shard/engine/test_flash_next_images",
        "conformance/test_conformance_slow",
        "conformance/test_conformance",
        "mtp/test_distribution",
        "shard/tools/share/test_share",
        "shard/tools/verify/test_verify",
        "shard/engine/test_batching",
        "shard/engine/test_choices",
        "shard/engine/test_lookup_in_batches",
        "shard/engine/test_split_copies",
        "shard/engine/test_answers_in_flight",
        "shard/engine/test_prefix_room",
        "shard/engine/test_answer_reads",
        "shard/engine/test_prompt_lookup",
        "shard/engine/test_prefix_transfer",
        "shard/engine/test_engine_modes",
        "shard/engine/test_damaged_embeddings",
        "shard/engine/test_block_drafts",
        "shard/engine/test_min_tokens",
        "shard/engine/test_prefill_memory",
        "shard/engine/test_batch_traces",
        "shard/runner/test_prefix_exchange",
        "shard/runner/test_read_exchange",
        "shard/engine/test_reading_together",
        "shard/engine/test_measuring",
        "shard/engine/test_engine_faults",
        "shard/text/test_prompt_encoder",
        "shard/text/test_picture_helper",
        "shard/text/test_published_templates",
        "shard/text/test_published_tokenizers",
        "shard/model/test_model_classes",
        "shard/engine/test_long_runs",
        "shard/engine/test_engine",
        "shard/engine/test_images",
        "shard/engine/test_embeddings",
        "shard/engine/test_encoders",
        "shard/engine/test_head_rests",
        "shard/tools/convert/test_convert",
        "shard/tools/convert/test_import_gguf",
        "shard/engine/test_structured",
        "shard/engine/test_windows",
        "shard/engine/test_prefix_cache",
        "shard/pipeline/test_prefixes",
        "mtp/test_garbage_heads",
        "mtp/test_published_heads",
        "shard/engine/test_rows_on_chips",
        "shard/engine/test_chip_answers",
        "shard/kernels/test_own_keys",
        "shard/model/test_families",
        "node/api/test_large_bodies",
        "node/api/test_long_answers",
        "shard/model/test_loader_import",
        "shard/model/test_self_check",
        "mtp/test_identity_matrix",
        "bench/mtp/test_bench_mtp",
        "shard/model/test_fusing_beside",
        "shard/engine/test_device_state",
        "shard/engine/test_stage_rounds",
        "shard/pipeline/test_resume_exact",
        "shard/engine/test_prefix_disk",
        "shard/engine/test_prefix_disk_kinds",
        "shard/text/test_call_divisions",
        "shard/text/test_hostile_calls",
        "shard/text/test_call_stream",
        "shard/engine/test_kv_quantisation",
        "shard/engine/test_replay",
        "shard/engine/test_loop_guard",
        "shard/checkpoint/test_real_layouts",
        "placement/test_plan_exact",
        "project/test_packaging",
        "project/test_formula",
        "mtp/test_batch_probe",
        "shard/text/test_bare_transformers",
    ),
    "kernels": (
        "shard/kernels/test_metal_rows",
        "shard/kernels/test_row_products",
        "shard/kernels/test_installed_texts",
        "shard/kernels/test_kernel_texts",
        "shard/kernels/test_attention_texts",
        "shard/kernels/test_fused_texts",
    ),
    "page": (
        "dashboard/test_page_journey",
        "dashboard/test_page_cluster",
        "dashboard/test_page",
        "dashboard/test_page_text",
        "dashboard/test_page_chat",
        "dashboard/test_page_picker",
        "dashboard/test_page_details",
        "dashboard/test_page_places",
        "dashboard/test_page_copies",
        "dashboard/test_page_first_visit",
        "dashboard/test_page_models",
        "dashboard/test_page_images",
        "dashboard/test_page_search",
        "dashboard/test_page_lost_node",
    ),
}
"""The files that take more than a few seconds of CPU, by part, the longest first.

All other files are the core. A slow file's test that is marked `smoke` belongs to the core too.
"""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """1.5 workers a core: tests often wait for other processes, such as nodes that elect a head."""
    return max(2, _cores() * 3 // 2)


def _cores() -> int:
    """The cores that a container or `taskset` allows, if the system reports them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The core imports no slow file without a test for it: each of its processes imports all."""
    if config.option.markexpr != "core" or _name(collection_path) not in _slow_names():
        return None
    return "mark.smoke" not in collection_path.read_text() or None


@functools.cache
def _slow_names() -> frozenset[str]:
    return frozenset(itertools.chain(*SLOW_FILES.values()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks each test with its part and puts the longest files first."""
    parts = {file: part for part, files in SLOW_FILES.items() for file in files}
    place = {file: number for number, file in enumerate(parts)}
    for item in items:
        part = parts.get(_name(item.path))
        if part is None or item.get_closest_marker("smoke"):
            item.add_marker("core")
        if part is not None:
            item.add_marker(part)
    items.sort(key=lambda item: place.get(_name(item.path), len(place)))


def _name(path: Path) -> str:
    """The name of a test file in `SLOW_FILES`, such as shard/engine/test_engine."""
    return path.relative_to(TESTS).with_suffix("").as_posix()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps imported modules and collected tests out of the garbage collector's passes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def own_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A configuration folder of the tests' own: none reads the profiles and cards of its user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("configuration")))
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder of profiles for all processes of the session."""
    base = tmp_path_factory.getbasetemp()
    kept_profiles.share((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "profiles")
    yield
    kept_profiles.share(None)
