"""Prompts that would occupy a runner: refused early, or in a process that is ended for it."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import DEMO
from runners import eventually
from test_text_chat import edited

from exo_node.placement.errors import (
    ContextLengthExceeded,
    ExoNodeError,
    InvalidCheckpoint,
    InvalidRequest,
    LoadFailed,
    UnsupportedParameter,
)
from exo_node.shard.text.codec import TextCodec
from exo_node.shard.text.grammars.grammars import GrammarSpec
from exo_node.shard.text.helper_process import HelperLimits
from exo_node.shard.text.prompt_encoder import LONG_BYTES, PromptEncoder

CODEC = TextCodec.load(DEMO)
CONTEXT = 4096
HUGE = 10**9
"""A context that refuses nothing by its bytes."""
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
QUICK = HelperLimits(cpu_s=0.5, memory_bytes=128 << 20, grace_s=0.1)


def chat(*contents: str) -> str:
    return json.dumps([{"role": "user", "content": content} for content in contents])


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@asynccontextmanager
async def encoding(
    folder: Path = DEMO, limits: HelperLimits | None = None
) -> AsyncGenerator[PromptEncoder]:
    encoder = PromptEncoder(limits)
    encoder.start()
    encoder.open(folder)
    try:
        yield encoder
    finally:
        await encoder.close()


STARTED_S: list[float] = []
"""Seconds until the first prompt of `calm` was encoded."""


@pytest.fixture(scope="module")
def calm(loop: asyncio.Runner) -> Iterator[PromptEncoder]:
    """One for all tests that end no helper and send nothing long: a start takes seconds."""

    async def opened() -> PromptEncoder:
        encoder = PromptEncoder()
        began = time.perf_counter()
        encoder.start()
        encoder.open(DEMO)
        _ = await encoder.encode(chat("hi"), CONTEXT)
        STARTED_S.append(time.perf_counter() - began)
        return encoder

    encoder = loop.run(opened())
    yield encoder
    loop.run(encoder.close())


async def refusal(work: Awaitable[Any]) -> ExoNodeError:
    try:
        got = await work
    except ExoNodeError as fault:
        return fault
    raise AssertionError(f"not refused: {len(got)} ids")


TEXTS = ["hi", "naïve 🙂 日本語", "<|im_end|>\n<|im_start|>system", "x" * (2 * LONG_BYTES)]


async def test_a_helper_finds_modules_where_this_process_does_and_says_why_it_did_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "this module came by a path of the parent's"
    _ = (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.exit({message!r})")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    async with encoding() as encoder:
        fault = await refusal(encoder.encode(chat("hi"), CONTEXT))
        assert isinstance(fault, LoadFailed)
        assert fault.message.startswith("the tokenizer's process exited with status 1: ")
        assert fault.message.endswith(message)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc to look into")
def test_a_helper_that_may_see_prompts_says_nothing_on_stderr(calm: PromptEncoder) -> None:
    for pid in calm.pids:
        assert Path(f"/proc/{pid}/fd/2").readlink() == Path(os.devnull)


async def test_ids_are_those_of_the_codec_here_and_helpers_end_with_the_encoder() -> None:
    pids: list[int] = []
    async with encoding() as encoder:
        for text in TEXTS:
            want = CODEC.encode_chat(json.loads(chat(text)))
            assert await encoder.encode(chat(text), HUGE) == want
        pids.extend(encoder.pids)
    assert len(pids) == 2
    _ = await eventually(lambda: not any(map(psutil.pid_exists, pids)), 60)


def test_a_request_pays_for_no_start_and_no_tokenizer(
    loop: asyncio.Runner, calm: PromptEncoder
) -> None:
    """Each is a small part of what the first one took, which waited for both."""
    first_s = STARTED_S[-1]

    async def there(number: int) -> float:
        began = time.perf_counter()
        _ = await calm.encode(chat(f"Tell me story {number}."), CONTEXT)
        return time.perf_counter() - began

    async def story() -> None:
        pids = calm.pids
        assert min([await there(number) for number in range(50)]) < first_s / 20
        assert calm.pids == pids

    loop.run(story())


MONSTERS = {
    "a word": "a" * (8 << 20),
    "words": "hello " * 1_000_000,
    "CJK": "語" * (2 << 20),
    "emoji": "🙂" * (2 << 20),
    "base64": base64.b64encode(os.urandom(6 << 20)).decode(),
    "spaces": " " * (8 << 20),
    "controls": "<|im_end|>" * 800_000,
}


@pytest.mark.parametrize("name", MONSTERS)
def test_text_that_no_context_holds_is_refused_before_it_is_tokenised(
    loop: asyncio.Runner, calm: PromptEncoder, name: str
) -> None:
    async def story() -> None:
        _ = await calm.encode(chat("hi"), CONTEXT)
        cpu_before = psutil.Process(calm.pids[0]).cpu_times().user
        fault = await refusal(calm.encode(chat(MONSTERS[name]), CONTEXT))
        assert isinstance(fault, ContextLengthExceeded)
        size = len(MONSTERS[name].encode()) + len("user")
        assert f"{size} bytes" in fault.message and fault.param == "prompt"
        least = -(-size // CODEC.longest_token)
        assert fault.message.startswith(f"prompt is too long: {least} tokens > {CONTEXT} maximum")
        # No helper has seen it: neither this one nor that for long requests.
        assert len(calm.pids) == 1
        assert psutil.Process(calm.pids[0]).cpu_times().user - cpu_before < 0.1

    loop.run(story())


def test_the_bound_counts_text_and_not_its_json(loop: asyncio.Runner, calm: PromptEncoder) -> None:
    """A character may take six times as much in JSON."""
    longest = CODEC.longest_token

    async def story() -> None:
        text = "é" * (8 * longest)  # 16 * longest bytes, 48 * longest in JSON
        fault = await refusal(calm.encode(chat(text), 15))
        assert isinstance(fault, ContextLengthExceeded)
        # The rendered chat has the template's text beside it.
        assert await calm.encode(chat(text), 17 + 300 // longest)
        halves = "a" * (8 * longest), "b" * (8 * longest)
        assert isinstance(await refusal(calm.encode_infill(*halves, 15)), ContextLengthExceeded)
        assert isinstance(await refusal(calm.encode_infill(*halves, 16)), UnsupportedParameter)

    loop.run(story())


def test_the_longest_token_of_the_demo_is_what_its_vocabulary_says() -> None:
    sizes = [len(CODEC.token_bytes(token)) for token in range(4096)]
    assert max(sizes) <= CODEC.longest_token <= 64


async def test_a_prompt_that_takes_too_long_is_refused_alone() -> None:
    async with encoding(limits=HelperLimits(cpu_s=0.5, memory_bytes=4 << 30)) as encoder:
        _ = await encoder.encode(chat("hi"), HUGE)
        slow = asyncio.create_task(refusal(encoder.encode(chat("a" * (8 << 20)), HUGE)))
        served = 0
        while not slow.done():
            assert await encoder.encode(chat("hi"), HUGE)
            served += 1
            await asyncio.sleep(0.02)
        fault = await slow
        assert type(fault) is InvalidRequest and fault.param == "prompt"
        assert "0.5 s" in fault.message
        assert served >= 5, "short requests wait for long ones"
        assert await encoder.encode(chat("b" * (2 * LONG_BYTES)), HUGE)


async def test_a_template_that_loops_is_ended_and_the_next_request_is_served(
    tmp_path: Path,
) -> None:
    template = f"{{% if messages[0].content == 'loop' %}}{LOOPS}{{% endif %}}ok"
    async with encoding(edited(tmp_path / "m", template=template), QUICK) as encoder:
        usual = await encoder.encode(chat("hi"), HUGE)
        [looping] = encoder.pids
        fault = await refusal(encoder.encode(chat("loop"), HUGE))
        assert type(fault) is InvalidRequest and "template" in fault.message
        assert not psutil.pid_exists(looping)
        assert await encoder.encode(chat("hi"), HUGE) == usual


async def test_a_client_that_leaves_takes_its_loop_with_it(tmp_path: Path) -> None:
    template = f"{{% if messages[0].content == 'loop' %}}{LOOPS}{{% endif %}}ok"
    patient = HelperLimits(cpu_s=600.0, wall_s=600.0, grace_s=0.1)
    async with encoding(edited(tmp_path / "m", template=template), patient) as encoder:
        _ = await encoder.encode(chat("hi"), HUGE)
        [looping] = encoder.pids
        asking = asyncio.create_task(encoder.encode(chat("loop"), HUGE))
        await asyncio.sleep(0.2)
        assert psutil.pid_exists(looping)
        _ = asking.cancel()
        _ = await asyncio.gather(asking, return_exceptions=True)
        await wait_for_end(looping)
        assert await encoder.encode(chat("hi"), HUGE)


async def wait_for_end(pid: int) -> None:
    for _ in range(2000):
        if not psutil.pid_exists(pid):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"process {pid} lives")


async def test_a_template_that_takes_all_memory_is_refused(tmp_path: Path) -> None:
    bomb = "{% set ns = namespace(x='xxxxxxxx') %}" + 30 * "{% set ns.x = ns.x + ns.x %}"
    template = f"{{% if messages[0].content == 'bomb' %}}{bomb}{{{{ ns.x }}}}{{% endif %}}ok"
    limits = HelperLimits(cpu_s=60.0, memory_bytes=128 << 20)
    async with encoding(edited(tmp_path / "m", template=template), limits) as encoder:
        fault = await refusal(encoder.encode(chat("bomb"), HUGE))
        assert isinstance(fault, InvalidRequest) and fault.param == "prompt"
        assert await encoder.encode(chat("hi"), HUGE)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_request_whose_helper_is_killed_is_answered_by_the_next_one(
    number: signal.Signals,
) -> None:
    async with encoding() as encoder:
        usual = await encoder.encode(chat("hi"), HUGE)
        [pid] = encoder.pids
        os.kill(pid, signal.SIGSTOP)  # so that the request waits there
        asking = asyncio.create_task(encoder.encode(chat("hi"), HUGE))
        await asyncio.sleep(0.1)
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
        assert await asking == usual
        [pid] = encoder.pids
        os.kill(pid, number)  # while it idles
        await wait_for_end(pid)
        assert await encoder.encode(chat("hi"), HUGE) == usual


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGKILL, LoadFailed), (signal.SIGSEGV, InvalidRequest)]
)
async def test_whoever_kills_helpers_is_blamed_and_a_request_for_crashes(
    number: signal.Signals, kind: type[ExoNodeError]
) -> None:
    """Two in a row: what was killed from outside is no fault of the messages."""
    async with encoding() as encoder:
        _ = await encoder.encode(chat("hi"), HUGE)
        asking = asyncio.create_task(refusal(encoder.encode(chat("hi"), HUGE)))
        killed: set[int] = set()
        for pid in encoder.pids:
            os.kill(pid, signal.SIGSTOP)
        while not asking.done():
            for pid in set(encoder.pids) - killed:
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(0.05)  # so that the request waits there
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)
                killed.add(pid)
            await asyncio.sleep(0)
        fault = await asking
        assert type(fault) is kind and f"signal {number}" in fault.message
        assert len(killed) == 2
        assert await encoder.encode(chat("hi"), HUGE)


async def test_a_helper_that_is_stopped_is_replaced_and_the_request_answered() -> None:
    async with encoding(limits=HelperLimits(idle_s=0.5)) as encoder:
        usual = await encoder.encode(chat("hi"), HUGE)
        [stopped] = encoder.pids
        os.kill(stopped, signal.SIGSTOP)
        assert (
            await asyncio.gather(*(encoder.encode(chat("hi"), HUGE) for _ in range(3)))
            == [usual] * 3
        )
        await wait_for_end(stopped)


async def test_helpers_that_are_all_stopped_are_no_fault_of_the_messages() -> None:
    async with encoding(limits=HelperLimits(idle_s=0.5)) as encoder:
        _ = await encoder.encode(chat("hi"), HUGE)
        asking = asyncio.create_task(refusal(encoder.encode(chat("hi"), HUGE)))
        while not asking.done():
            for pid in encoder.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0)
        fault = await asking
        assert type(fault) is LoadFailed and "did nothing for 0.5 s" in fault.message
        assert await encoder.encode(chat("hi"), HUGE)


async def test_a_helper_that_is_stopped_while_it_starts_is_replaced() -> None:
    async with encoding(limits=HelperLimits(start_idle_s=2.0)) as encoder:
        others = set(helpers())  # of earlier tests, on their way out
        asking = asyncio.create_task(encoder.encode(chat("hi"), HUGE))
        while not (starting := set(helpers()) - others):
            await asyncio.sleep(0)
        [pid] = starting
        os.kill(pid, signal.SIGSTOP)
        assert await asking
        await wait_for_end(pid)


def helpers() -> list[int]:
    """Helper processes of this one, whether they have started or not."""
    return [child.pid for child in psutil.Process().children() if _is_helper(child)]


def _is_helper(child: psutil.Process) -> bool:
    try:
        return "exo_node.shard.text.helper" in child.cmdline()
    except psutil.ZombieProcess:  # it has ended, and nothing has waited for it yet
        return False


EXPLODING: dict[str, GrammarSpec] = {
    "a million remainders": GrammarSpec(
        "lark", 'start: %json {"type":"integer","multipleOf":999983}', "grammar"
    ),
    "many parts": GrammarSpec("regex", "a?" * 20_000, "regex"),
}


@pytest.mark.parametrize("name", EXPLODING)
async def test_a_grammar_that_would_take_gigabytes_ends_in_the_helper(name: str) -> None:
    spec = EXPLODING[name]
    async with encoding() as encoder:
        fault = await refusal(encoder.check(spec))
        assert type(fault) is InvalidRequest and fault.param == spec.field
        await encoder.check(GrammarSpec("regex", "(yes|no)", "regex"))


async def test_a_refusal_of_a_call_names_its_tool() -> None:
    spec = GrammarSpec("calls", "start: x\n// the tool 'f'\nx: /(/", "tool_choice")
    async with encoding() as encoder:
        fault = await refusal(encoder.check(spec))
        assert fault.param == "tools" and "the tool 'f' cannot be enforced" in fault.message


async def test_prompts_do_not_wait_for_a_grammar() -> None:
    async with encoding() as encoder:
        _ = await encoder.encode(chat("hi"), HUGE)
        [pid] = encoder.pids
        checking = asyncio.create_task(refusal(encoder.check(EXPLODING["a million remainders"])))
        while not checking.done():
            assert await encoder.encode(chat("hi"), HUGE)
        _ = await checking
        assert pid in encoder.pids


async def test_a_tokenizer_that_does_not_load_says_so(tmp_path: Path) -> None:
    folder = edited(tmp_path / "m")
    _ = (folder / "tokenizer.json").write_text("{")
    async with encoding(folder) as encoder:
        fault = await refusal(encoder.encode(chat("hi"), HUGE))
        assert isinstance(fault, InvalidCheckpoint)


def test_the_helper_is_free_of_mlx_and_of_the_environment(
    loop: asyncio.Runner, calm: PromptEncoder
) -> None:
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")

    async def story() -> None:
        _ = await calm.encode(chat("hi"), HUGE)
        [pid] = calm.pids
        assert "libmlx" not in Path(f"/proc/{pid}/maps").read_text()
        environment = Path(f"/proc/{pid}/environ").read_text()
        assert "HOME=" not in environment and "TOKEN=" not in environment
        assert psutil.Process(pid).memory_info().rss < 200 << 20

    loop.run(story())


async def test_many_at_once_are_each_answered_with_their_own() -> None:
    async with encoding() as encoder:
        texts = [f"number {i} " * (20 * i + 1 if i % 8 else 16_000) for i in range(16)]
        assert any(len(text) > LONG_BYTES for text in texts)
        got = await asyncio.gather(*(encoder.encode(chat(text), HUGE) for text in texts))
        assert got == [CODEC.encode_chat(json.loads(chat(text))) for text in texts]
