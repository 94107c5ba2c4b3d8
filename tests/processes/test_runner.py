"""One runner process: the requests that it refuses, loads that fail, and how it ends."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest
from engines import DEMO, STORY, SUM, last_spec, load_quietly, message, spec
from runners import Child, Placement, eventually, on_answer, runner_host, running
from test_load_watch import STUCK

from exo_node.node.machine.timing import LAN
from exo_node.node.runners.runner_process import RunnerProcess
from exo_node.node.runners.supervisor import Supervisor
from exo_node.placement.errors import ExoNodeError, InvalidCheckpoint, InvalidRequest, LoadFailed
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.kernels.fused_code import VERSION, users_folder

WITHIN_S = 180.0
"""Long, so that a loaded machine fails no test."""


@pytest.fixture(scope="module")
async def one() -> AsyncIterator[Placement]:
    fields: dict[str, Any] = {"native_mtp": True, "max_draft_tokens": 3, "context_length": 4096}
    async with running((0, 16), **fields) as placement:
        yield placement


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists mapped files")
async def test_only_a_generator_loads_the_tokenizers_library(
    one: Placement, tmp_path: Path
) -> None:
    library = "tokenizers.abi3.so"
    assert library in Path(f"/proc/{one.processes[0].pid}/maps").read_text()
    with Child(last_spec(), tmp_path / "stderr") as last:
        _ = last.until("ready")
        assert library not in Path(f"/proc/{last.process.pid}/maps").read_text()


BAD_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "another placement": ("placement", {"placement": "p2"}),
    "no name": ("request", {"request": ""}),
    "a long name": ("request", {"request": "r" * 65}),
    "a name with a path": ("request", {"request": "../r"}),
    "attempt 0": ("attempt", {"attempt": 0}),
    "an empty stop string": ("stop", {"stop": ["x", ""]}),
    "an id over the vocabulary": ("prompt", {"token_ids": pb.TokenIds(ids=[1, 4096])}),
    "an id far over it": ("prompt", {"token_ids": pb.TokenIds(ids=[2**31 - 1])}),
    "a row of an image that is not there": ("images", {"token_ids": pb.TokenIds(ids=[1, -5])}),
    "no prompt": ("prompt", {"token_ids": None}),
    "no ids": ("prompt", {"token_ids": pb.TokenIds()}),
    "messages that are no JSON": ("messages", {"messages": pb.Messages(json="{")}),
    "messages that are no list": ("messages", {"messages": pb.Messages(json="{}")}),
    "messages without content": ("prompt", {"messages": pb.Messages(json='[{"role": 1}]')}),
    "more drafts than loaded": ("num_draft_tokens", {"num_draft_tokens": 4}),
    "negative drafts": ("num_draft_tokens", {"num_draft_tokens": -1}),
    "a prompt as long as the context": ("prompt", {"token_ids": pb.TokenIds(ids=[1] * 4096)}),
    "a prompt beyond the context": ("prompt", {"token_ids": pb.TokenIds(ids=[1] * 4097)}),
    "a replay without tokens": ("replay", {"replay": [pb.Round(forward=pb.Forward(rows=1))]}),
    "a replay over the vocabulary": (
        "replay",
        {"replay": [pb.Round(tokens=[4096], forward=pb.Forward(rows=1))]},
    ),
    "a replay with fewer rows than tokens": (
        "replay",
        {"replay": [pb.Round(tokens=[1, 2], forward=pb.Forward(rows=1))]},
    ),
    "a replay of too many rows": (
        "replay",
        {"replay": [pb.Round(tokens=[1], forward=pb.Forward(rows=2**31))]},
    ),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
async def test_a_bad_request_is_refused_by_the_fields_name(one: Placement, case: str) -> None:
    param, changes = BAD_REQUESTS[case]

    request = one.request(SUM["prompt_ids"])
    for field in pb.GenerateRequest.DESCRIPTOR.fields_by_name.keys() & changes.keys():
        request.ClearField(field)  # type: ignore[arg-type]
    request.MergeFrom(message(**changes))
    with pytest.raises(InvalidRequest) as caught:
        async for _ in one.generate(request):
            pass
    assert caught.value.param == param
    good = await one.answer(SUM["prompt"], max_tokens=2)
    assert good.ids == SUM["greedy_ids"][:2]


async def test_a_request_name_in_use_is_refused_and_its_first_request_continues(
    one: Placement,
) -> None:
    first = one.generate(one.request(STORY["prompt"], request="same", max_tokens=30))
    while (await anext(first)).WhichOneof("event") != "delta":
        pass
    with pytest.raises(InvalidRequest, match="running already") as caught:
        _ = await one.answer(SUM["prompt"], request="same")
    assert caught.value.param == "request"
    *_, last = [event async for event in first]
    assert last.finished.reason == "length"


# ------------------------------------------------------------------- failures


def demo_with(tmp_path: Path, change: Callable[[Path], object]) -> Path:
    """A folder of links to the demo's files, changed by `change`."""
    folder = tmp_path / "demo"
    folder.mkdir()
    for file in DEMO.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)
    change(folder)
    return folder


def replace_file(folder: Path, name: str, data: bytes) -> None:
    (folder / name).unlink()
    _ = (folder / name).write_bytes(data)


SHARD = "model-00002-of-00003.safetensors"


def garble_shard(folder: Path) -> None:
    replace_file(folder, SHARD, b"\xff" * 4096)


def truncate_shard(folder: Path) -> None:
    replace_file(folder, SHARD, (DEMO / SHARD).read_bytes()[:-1000])


def empty_tokenizer(folder: Path) -> None:
    replace_file(folder, "tokenizer.json", b'{"added_tokens": [], "model": {}}')


def set_unknown_family(folder: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    replace_file(folder, "config.json", json.dumps(config | {"model_type": "../x"}).encode())


FAILURES: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "garbled weights": (garble_shard, {}, "invalid_checkpoint"),
    "truncated weights": (truncate_shard, {}, "invalid_checkpoint"),
    "no tokenizer": (empty_tokenizer, {}, "invalid_checkpoint"),
    "an unknown family": (set_unknown_family, {}, "invalid_checkpoint"),
    "another revision": (lambda _: None, {"checkpoint_sha256": "0" * 64}, "invalid_checkpoint"),
    "layers that are not there": (lambda _: None, {"first": 8, "end": 17}, "load_failed"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_load_that_fails_names_its_cause(tmp_path: Path, case: str) -> None:
    """In this process; the next test shows how a runner reports each kind."""
    change, changes, code = FAILURES[case]
    with pytest.raises(ExoNodeError) as caught:
        _ = load_quietly(spec(demo_with(tmp_path, change), **changes))
    assert caught.value.code == code
    assert caught.value.message


async def test_a_failed_load_leaves_neither_state_nor_process(
    tmp_path: Path,
) -> None:
    exited: list[str] = []
    supervisor = Supervisor(runner_host(), lambda _, why: exited.append(why))
    children = psutil.Process().children
    before = {child.pid for child in children()}
    with pytest.raises(InvalidCheckpoint, match=SHARD):
        _ = await supervisor.load(spec(demo_with(tmp_path, truncate_shard)), lambda _: None)
    assert supervisor.states() == []
    assert exited == []
    assert {child.pid for child in children()} <= before


async def test_a_runner_that_dies_while_it_loads_is_a_failed_load() -> None:
    process = RunnerProcess(spec(), lambda _: None, on_answer, LAN)
    loading = asyncio.ensure_future(process.start(runner_host(), lambda _: None))
    _ = await eventually(lambda: process.pid > 0, WITHIN_S)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(LoadFailed, match="demo, layers 0-15, was ended by signal 9"):
        _ = await loading
    assert process.status == "failed"
    await process.stop()


# --------------------------------------------------------------------- ending


def test_a_runner_ends_with_its_node_while_it_loads(tmp_path: Path) -> None:
    """The load never ends, so the runner cannot be waiting for it."""
    _ = (tmp_path / "sitecustomize.py").write_text(STUCK)
    with Child(last_spec(), tmp_path / "stderr", PYTHONPATH=str(tmp_path)) as child:
        _ = child.until("progress")
        child.hang_up()
        assert child.process.wait(WITHIN_S) == 0


def test_a_stopped_runner_exits_cleanly_and_keeps_compiled_code(tmp_path: Path) -> None:
    """Also code compiled since it last kept some, up to half a minute before."""
    fused_folder = seeded_cache(tmp_path)
    with Child(
        spec(end=1, num_stages=2), tmp_path / "stderr", XDG_CACHE_HOME=str(tmp_path / "cache")
    ) as child:
        _ = child.until("ready")
        while not child.until("state").state.active_memory_bytes:
            pass  # the first report keeps the code compiled before it
        late = [own / "late.so" for own in fused_folder.glob(f"run-*/mlx/{VERSION}/cpu")]
        for library in late:  # as MLX does for a request
            _ = library.write_bytes(b"whole")
        child.stop()
        assert child.process.wait(WITHIN_S) == 0
        # On a Linux CPU it logs which kernels multiply, and what it has to measure.
        logged = child.stderr.splitlines()
        usual = (":kernels: ", "not measured yet")
        lines = [line for line in logged if not any(words in line for words in usual)]
        if "a forward was under way" in "".join(lines):  # or the machine was too slow
            _ = lines.pop()
        elif late:
            assert (fused_folder / "kept" / "cpu" / "late.so").read_bytes() == b"whole"
        assert lines == []
        assert bool(late) != mx.metal.is_available() and not list(fused_folder.glob("run-*"))


def seeded_cache(tmp_path: Path) -> Path:
    """A cache that begins as a copy of the user's: compiling again takes seconds."""
    users = users_folder()
    assert users is not None
    fused_folder = tmp_path / "cache" / "exo-node" / "fused" / users.name
    fused_folder.mkdir(mode=0o700, parents=True)
    if (users / "kept").exists():
        _ = shutil.copytree(users / "kept", fused_folder / "kept")
    return fused_folder


async def test_a_requested_stop_is_no_failure() -> None:
    exited: list[RunnerProcess] = []
    process = RunnerProcess(last_spec(), exited.append, on_answer, LAN)
    _ = await process.start(runner_host(), lambda _: None)
    pid = process.pid
    await process.stop()
    assert not psutil.pid_exists(pid)
    assert exited == []


async def test_a_runner_inherits_no_variables_of_its_node(one: Placement) -> None:
    environment = psutil.Process(one.processes[0].pid).environ()
    assert not [name for name in environment if name.startswith("EXO_")]
    assert environment["HF_HUB_OFFLINE"] == "1"
