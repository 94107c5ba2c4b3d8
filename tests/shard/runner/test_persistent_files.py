"""Files that outlive a runner, and the loads of a model that may use them."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from small import small_checkpoint

from exo_node.mtp.families.family import Family
from exo_node.mtp.families.head import DraftHead
from exo_node.placement.reading import may_read
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.prefixes.disk import MIN_ROWS
from exo_node.shard.engine.prefixes.memory import PrefixCache
from exo_node.shard.engine.prefixes.prompt_path import PromptPath
from exo_node.shard.engine.states.state import State
from exo_node.shard.kernels.trial import KernelChoice
from exo_node.shard.model.block_drafter import BlockDrafter
from exo_node.shard.model.draft_pair import DraftPair
from exo_node.shard.runner import persistent_files
from exo_node.shard.runner.persistent_files import (
    prefix_disk_of,
    profile_of,
    shared_prefix_key,
)

END = 7
PROMPT = [*range(10, 9 + MIN_ROWS), END, 8, 9]
PATH = PromptPath(PROMPT, [MIN_ROWS, len(PROMPT)])
BEHIND_ANOTHER = pb.PlacementPlan(stages=[pb.PlannedStage(node="a", end_layer=1)])


class Load:
    """One load after the other of a checkpoint with one file of weights."""

    def __init__(self, folder: Path) -> None:
        self.weights = folder / "model.safetensors"
        _ = self.weights.write_bytes(b"weights")
        self._folder = folder

    def _disk(self, head: Any = None, **changes: Any) -> Any:
        fields: dict[str, Any] = {
            "path": str(self._folder),
            "prefix_folder": str(self._folder / "prefixes"),
            "prefix_disk_bytes": 1 << 20,
            "prefix_cache_bytes": 1 << 20,
            "dtype": "float32",
            "prefill_chunk": 512,
        }
        model = SimpleNamespace(make_caches=lambda: [KVCache()])
        loaded: Any = SimpleNamespace(model=model, fingerprint="headers", kernels=(), head=head)
        disk = prefix_disk_of(pb.StageSpec(**(fields | changes)), loaded)
        assert disk is not None
        return disk

    def keep(self) -> None:
        """The prompt's first turn."""
        cache: Any = KVCache()
        _ = cache.update_and_fetch(mx.ones((1, 1, MIN_ROWS, 8)), mx.ones((1, 1, MIN_ROWS, 8)))
        disk, memory = self._disk(), PrefixCache(1 << 20, lambda: [KVCache()])
        node = memory.insert(PATH.inner, State([cache], MIN_ROWS), MIN_ROWS)
        assert node is not None
        disk.put(node)
        while disk.save_next(memory.holds):
            time.sleep(0.001)

    def finds(self, **changes: Any) -> bool:
        """Whether a later load with these changes has it."""
        return self._disk(**changes).find(PATH, 0) is not None


@pytest.fixture
def load(tmp_path: Path) -> Load:
    new_load = Load(tmp_path)
    new_load.keep()
    return new_load


def test_the_same_weights_find_the_prefix(load: Load) -> None:
    assert load.finds()


def test_states_with_the_rows_of_a_drafter_are_its_own(load: Load) -> None:
    """Those of a head have other layers, and costs of a drafter are not a head's either."""
    drafter = object.__new__(BlockDrafter)
    drafter.fingerprint = "one"
    assert not load.finds(head=drafter)
    pair = DraftPair(object.__new__(Family), DraftHead.__new__(DraftHead), drafter)
    assert not load.finds(head=pair) and pair.fingerprint != drafter.fingerprint


def test_weights_that_were_replaced_find_no_prefix(load: Load) -> None:
    """Other weights of the same size, name and headers, whose fingerprint is the same."""
    stat = load.weights.stat()
    _ = load.weights.write_bytes(b"changed")
    os.utime(load.weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))
    assert not load.finds()


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"kv_bits": 8},
        {"kv_group_size": 32},
        {"prefill_chunk": 256},
        {"reads_any": True},
        {"first_layer": 1},
        {"end_layer": 2},
        {"stage": 1, "plan": BEHIND_ANOTHER},
    ],
    ids=str,
)
def test_what_decides_a_prefixes_bits_decides_whether_it_is_found(
    changes: dict[str, Any], load: Load
) -> None:
    assert not load.finds(**changes)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same checkpoint on three machines, the last with other weights under the same headers."""
    folders = [tmp_path_factory.mktemp("copies") / f"{number}" for number in range(3)]
    for seconds, folder in enumerate(folders):
        _ = shutil.copytree(small_checkpoint(), folder)
        for path in folder.glob("*"):
            os.utime(path, (seconds, seconds))
    weights = folders[2] / "model.safetensors"
    data = weights.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    _ = weights.write_bytes(data[:begin] + bytes(byte ^ 1 for byte in data[begin:]))
    return folders


def _shared_key(folder: Path, kernels: tuple[Any, ...] = (), **changes: Any) -> str:
    fields: dict[str, Any] = {"num_stages": 1, "prefix_cache_bytes": 1 << 20, "dtype": "float32"}
    spec = pb.StageSpec(path=str(folder), **(fields | changes))
    loaded: Any = SimpleNamespace(fingerprint="headers", kernels=kernels, head=None)
    return shared_prefix_key(spec, loaded)


def test_copies_of_a_checkpoint_share_states_if_their_weights_are_alike(copies: list[Path]) -> None:
    first, second, other = map(_shared_key, copies)
    assert first == second and len(first) > 20
    assert first != other


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"kv_bits": 8},
        {"prefill_chunk": 256},
        {"kernels": (KernelChoice("a kernel", "a shape", 16, True, ""),)},
    ],
    ids=str,
)
def test_what_decides_a_states_bits_decides_the_shared_key(
    changes: dict[str, Any], copies: list[Path]
) -> None:
    assert _shared_key(copies[0], **changes) not in ("", _shared_key(copies[0]))


@pytest.mark.parametrize("package", ["exo-node", "mlx", "mlx-lm"])
def test_a_new_version_of_what_decides_bits_is_measured_again(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def file() -> str:
        spec = pb.StageSpec(profile_folder=str(tmp_path), num_stages=1, dtype="float32")
        loaded: Any = SimpleNamespace(fingerprint="headers", kernels=(), head=None)
        return persistent_files.profile_of(spec, loaded).key.file

    def newer(name: str) -> str:
        return "9" if name == package else versions(name)

    before, versions = file(), persistent_files.version
    monkeypatch.setattr(persistent_files, "version", newer)
    assert file() != before


def test_copies_on_another_kind_of_machine_may_read_if_both_allow_it(
    copies: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a machine computed that allows it is of no use to one that does not, and on no disk."""
    mine, mixed = _shared_key(copies[0]), _shared_key(copies[0], reads_any=True)
    assert not may_read(mine, mixed) and not may_read(mixed, mine)
    monkeypatch.setattr(persistent_files, "_processor", lambda: ("another",))
    theirs, also_mixed = _shared_key(copies[1]), _shared_key(copies[1], reads_any=True)
    assert not may_read(mine, theirs) and may_read(mixed, also_mixed) and mixed != also_mixed
    assert not may_read(mixed, theirs)
    different: list[dict[str, Any]] = [{"dtype": "float16"}, {"kv_bits": 8}, {"prefill_chunk": 256}]
    for changes in different:
        assert not may_read(mixed, _shared_key(copies[1], reads_any=True, **changes)), changes
    assert not may_read(mixed, _shared_key(copies[2], reads_any=True))
    kernels = (KernelChoice("a kernel", "a shape", 16, True, ""),)
    assert may_read(mixed, _shared_key(copies[1], kernels, reads_any=True))


def test_the_disk_tier_does_not_decide_the_shared_key(copies: list[Path]) -> None:
    with_disk = _shared_key(copies[0], prefix_disk_bytes=1 << 20, prefix_folder="/nowhere")
    assert with_disk == _shared_key(copies[0])


def test_states_of_split_models_and_of_models_without_a_cache_are_not_shared(
    copies: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert _shared_key(copies[0], num_stages=2) == ""
    assert _shared_key(copies[0], prefix_cache_bytes=0) == ""
    assert not caplog.records
    assert _shared_key(tmp_path) == ""  # its files are gone since they were loaded
    assert "states are not shared" in caplog.text


def test_a_first_stage_has_a_profile_of_its_layers(tmp_path: Path) -> None:
    """What a whole model measured says nothing of a part, and the other way round."""
    loaded: Any = SimpleNamespace(fingerprint="headers", kernels=(), head=None)

    def path(**fields: Any) -> Path | None:
        spec = pb.StageSpec(profile_folder=str(tmp_path), dtype="float32", **fields)
        return profile_of(spec, loaded).path

    whole = path(num_stages=1, end_layer=4)
    parts = [path(num_stages=2, end_layer=end) for end in (1, 2)]
    assert len({whole, *parts}) == 3 and parts[0] == path(num_stages=3, end_layer=1)
