"""A GPU's last words are told from other ends, and shorten the chunk of prompts."""

import pytest
from cards import card

from exo_node.placement.chunk import prefill_chunk
from exo_node.placement.cluster import ClusterView, NodeFacts
from exo_node.placement.gpu_faults import (
    SHORTEST,
    ChunkLimit,
    GpuFault,
    gpu_fault,
    is_failed_command,
    limit_of,
    shortened,
)
from exo_node.placement.ids import NodeId
from exo_node.placement.plan import plan

ABORTS = "libc++abi: terminating due to uncaught exception of type std::runtime_error: "
FAILED = "[METAL] Command buffer execution failed: "
INTERACTIVITY = f"{FAILED}Impacting Interactivity (0000000e:{{}}ImpactingInteractivity)"
CALLBACK = "kIOGPUCommandBufferCallbackError"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (ABORTS + INTERACTIVITY.format(CALLBACK), "watchdog"),
        (INTERACTIVITY.format(CALLBACK) + ".", "watchdog"),
        (f"{FAILED}Caused GPU Timeout Error (00000002:{CALLBACK}Timeout)", "watchdog"),
        (f"{FAILED}Caused GPU Hang Error (00000003:{CALLBACK}Hang)", "watchdog"),
        ("cuGraphLaunch failed: the launch timed out and was terminated", "watchdog"),
        (f"{ABORTS}{FAILED}Insufficient Memory (00000008:{CALLBACK}OutOfMemory)", "memory"),
        (
            "[metal::malloc] Attempting to allocate 68719476736 bytes which is greater than the "
            "maximum allowed buffer size of 22906503168 bytes.",
            "memory",
        ),
        ("[malloc] Unable to allocate 34359738368 bytes.", "memory"),
        ("cudaMallocAsync(&data, size, stream) failed: out of memory", "memory"),
        (
            f"{FAILED}Discarded (victim of GPU error/recovery) (5:{CALLBACK}InnocentVictim)",
            "device",
        ),
        (f"{FAILED}Ignored (for causing errors) (4:{CALLBACK}SubmissionsIgnored)", "device"),
        ("cudaStreamSynchronize failed: an illegal memory access was encountered", "device"),
        ("Segmentation fault", None),
        ("the watchdog ran out of memory and timed out", None),
        ("", None),
    ],
)
def test_faults_are_told_by_the_words_of_mlx_and_the_systems(
    words: str, fault: GpuFault | None
) -> None:
    assert gpu_fault(words) == fault
    has_begun = fault in ("watchdog", "device") or FAILED in words
    assert is_failed_command(words) is has_begun


def test_a_watchdog_halves_the_chunk_down_to_the_shortest() -> None:
    chunk, rows = 512, list[int]()
    while (limit := shortened(chunk, "watchdog", is_short=True)) is not None:
        chunk = limit.rows
        rows.append(chunk)
    assert rows == [256, 128, 64, SHORTEST]


def test_want_of_memory_shortens_once_and_a_failing_gpu_never() -> None:
    assert shortened(512, "memory") == ChunkLimit(256, "memory")
    assert shortened(256, "memory", is_short=True) is None
    assert shortened(512, "device") is None


@pytest.mark.parametrize(
    ("rows", "fault"), [(0, "watchdog"), (SHORTEST - 1, "watchdog"), (256, ""), (256, "thirst")]
)
def test_what_names_no_limit_is_none(rows: int, fault: str) -> None:
    """A peer or a file may say anything."""
    assert limit_of(rows, fault) is None


def test_a_placement_reads_prompts_as_its_most_limited_node_can_and_says_so() -> None:
    def facts(name: str, limit: ChunkLimit | None) -> NodeFacts:
        return NodeFacts(NodeId(name), name, 10**12, 1e11, "metal", chunk_limit=limit)

    limited, free = facts("a", ChunkLimit(64, "watchdog")), facts("b", None)
    model = card()
    alone = plan(model, ClusterView((free,)))
    placed = plan(model, ClusterView((limited,)))
    assert placed.prefill_chunk == 64 < alone.prefill_chunk
    assert "prompts are read 64 tokens at a time" in placed.reason
    assert "at a time" not in alone.reason
    assert prefill_chunk(model, (free, limited)) == 64
