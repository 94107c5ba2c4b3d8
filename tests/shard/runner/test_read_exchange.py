"""Prompts that two and three runners read over TLS, and readers that hang, die, or lie.

The runners are services in this process, with the certificates and the ports of real ones.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from cut_reads import noting_cut_reads
from engines import message
from prefixes import CHUNK, TOKENS, cold, engine, hybrid, turn, words

from exo_node.node.trust.certificates import channel_credentials, runner_credentials
from exo_node.node.trust.keys import ClusterKey
from exo_node.placement.errors import NumericError
from exo_node.placement.ids import NodeId
from exo_node.placement.reading import reading_key
from exo_node.proto import peer_pb2 as pb
from exo_node.proto import peer_pb2_grpc
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.compute import ComputeThread
from exo_node.shard.engine.prefixes.encoding import DeviceBytes
from exo_node.shard.engine.reading import layer_read, shared_reading
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.runner import read_service, remote_readers
from exo_node.shard.runner.generator_service import GeneratorService
from exo_node.shard.runner.prefix_exchange import connected
from exo_node.shard.runner.read_service import MOST_READS, ReadService
from exo_node.shard.runner.remote_readers import readers_of

KEY = "the same model"
CLUSTER = ClusterKey(b"0123456789abcdefghij")
NODE = NodeId("a" * 20)
ANY: Any = None
PROMPT = [*turn(300, 1), *words(CHUNK * 4 + 7, 2)]
SERVICER: Any = peer_pb2_grpc.ReadingServicer
Serve = Callable[[Any, Any], AsyncIterator[pb.ReadReply]]


def limits(placement: str) -> StageLimits:
    return StageLimits(placement, 1, "float32", 64, CHUNK, 4096, 4096)


@dataclass
class Runner:
    """A whole model's services with their engine."""

    placement: str
    engine: TextEngine = field(default_factory=engine)
    compute: ComputeThread = field(default_factory=ComputeThread)
    key: str = KEY

    def __post_init__(self) -> None:
        own = limits(self.placement)
        self.reading = ReadService(own, self.key, self.engine, self.compute)
        credentials = channel_credentials(runner_credentials(NODE, CLUSTER))
        readers = partial(readers_of, self.key, credentials, own, self.compute)
        self.service = GeneratorService(own, self.engine, self.compute, ANY, None, None, readers)

    async def ask(
        self, readers: list[pb.Reader], k: int = 0, prompt: list[int] = PROMPT
    ) -> pb.Stats:
        """The stats of an answer, whose ids are those of an engine that reads alone."""
        wire = wire_of(self.placement, readers, k, prompt)
        ids, stats = list[int](), None
        async for event in self.service.Generate(wire, ANY):
            ids += event.delta.round.tokens
            if event.HasField("finished"):
                stats = event.finished.stats
        assert stats is not None and tuple(ids) == cold(prompt, k)[0]
        return stats


def wire_of(
    placement: str, readers: list[pb.Reader], k: int, prompt: list[int]
) -> pb.GenerateRequest:
    return message(
        placement=placement,
        request="r",
        attempt=1,
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.Sampling(top_p=1.0),
        max_tokens=TOKENS,
        num_draft_tokens=k,
        drafting_reason="" if k else "a test",
        readers=readers,
        read_reason="a test",
    )


@asynccontextmanager
async def served(reading: Any) -> AsyncGenerator[tuple[pb.PrefixSource, grpc.aio.Server]]:
    server = grpc.aio.server()
    peer_pb2_grpc.add_ReadingServicer_to_server(reading, server)
    own = runner_credentials(NODE, CLUSTER)
    credentials = grpc.ssl_server_credentials(
        [(own.key_pem, own.certificate_pem)], own.authority_pem, require_client_auth=True
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    ready = pb.LoadReady(host="127.0.0.1", port=port)
    try:
        yield pb.PrefixSource(placement="reader", ready=ready, node=NODE), server
    finally:
        await server.stop(None)


def reader(source: pb.PrefixSource, first: int = 2, end: int = 4) -> pb.Reader:
    return pb.Reader(source=source, first_layer=first, end_layer=end)


Story = Callable[[Runner, list[pb.PrefixSource], list[grpc.aio.Server]], Awaitable[None]]


def play(story: Story, *readings: Any, target: Runner | None = None) -> None:
    """An answering runner, and where readers are served. Nothing is left of them."""

    async def run() -> None:
        await with_target(target or Runner("target"))

    async def with_target(target: Runner) -> None:
        try:
            async with asyncio.timeout(50):
                if len(readings) == 1:
                    async with served(readings[0]) as (source, server):
                        await story(target, [source], [server])
                else:
                    async with served(readings[0]) as one, served(readings[1]) as two:
                        await story(target, [one[0], two[0]], [one[1], two[1]])
        finally:
            target.compute.close()
        tasks = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
        assert not [each for each in tasks if "read" in str(each.get_coro())]

    asyncio.run(run())


@pytest.fixture
def runners() -> Any:
    both = [Runner("reader", engine(hybrid(number))) for number in (1, 2)]
    yield both
    for each in both:
        each.compute.close()


def is_free(runner: Runner) -> bool:
    keys = runner.compute.submit(lambda: (runner.engine._engine.keys, runner.engine.cache_bytes()))  # pyright: ignore[reportPrivateUsage]
    return keys.result() == (set(), 0)


async def until_free(runner: Runner) -> None:
    async with asyncio.timeout(10):
        while not await asyncio.to_thread(is_free, runner):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("k", [0, pytest.param(2, marks=pytest.mark.smoke)])
def test_one_reader(runners: list[Runner], k: int) -> None:
    async def story(target: Runner, sources: Any, _: Any) -> None:
        stats = await target.ask([reader(sources[0])], k)
        assert (list(stats.read_by), stats.read_reason) == ([NODE], "a test")
        assert stats.read_bytes > 100_000 and stats.read_s > 0
        await until_free(runners[0])
        longer = [*PROMPT, *words(CHUNK * 4, 3)]
        again = await target.ask([reader(sources[0])], k, longer)
        assert again.cached_tokens > 0 and list(again.read_by) == [NODE]

    play(story, runners[0].reading)


@pytest.mark.parametrize("k", [0, 2])
def test_two_readers(runners: list[Runner], k: int) -> None:
    async def story(target: Runner, sources: Any, _: Any) -> None:
        chain = [reader(sources[0], 1, 2), reader(sources[1], 2, 4)]
        stats = await target.ask(chain, k)
        assert (len(stats.read_by), stats.read_reason) == (2, "a test")
        for runner in runners:
            await until_free(runner)

    play(story, *(each.reading for each in runners))


def test_a_reader_of_another_kind_reads_where_both_allow_it_and_the_answer_says_so() -> None:
    """What it has read stays in the cache, so that later answers say it too."""
    mac, box = (reading_key("model", kind, any_kind=True) for kind in ("mac", "box"))
    target, other = (
        Runner("target", engine(reads_any=True), key=mac),
        Runner("reader", engine(hybrid(1)), key=box),
    )

    async def story(target: Runner, sources: Any, _: Any) -> None:
        short = await target.ask([], 0, PROMPT[:40])
        assert (short.resume_exact, short.read_reason) == (True, "a test")
        stats = await target.ask([reader(sources[0])], 1)
        assert list(stats.read_by) == [NODE] and not stats.resume_exact
        assert "a test; another kind of machine read a part" in stats.read_reason
        again = await target.ask([], 1, [*PROMPT, *words(40, 3)])
        assert again.cached_tokens > 0 and not again.resume_exact
        assert again.read_reason.startswith("cached rows may be of another kind of machine")

    try:
        play(story, other.reading, target=target)
    finally:
        other.compute.close()


def test_a_reader_of_the_same_kind_leaves_the_bits_as_they_are() -> None:
    key = reading_key("model", "mac", any_kind=True)
    target, other = (
        Runner("target", engine(reads_any=True), key=key),
        Runner("reader", engine(hybrid(1)), key=key),
    )

    async def story(target: Runner, sources: Any, _: Any) -> None:
        stats = await target.ask([reader(sources[0])], 1)
        assert list(stats.read_by) == [NODE] and stats.resume_exact
        assert stats.read_reason == "a test"

    try:
        play(story, other.reading, target=target)
    finally:
        other.compute.close()


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (("model", "mac", False), ("model", "box", False)),
        (("model", "mac", False), ("model", "mac", True)),
        (("model", "mac", True), ("model", "mac", False)),
        (("model", "mac", True), ("another", "mac", True)),
    ],
)
def test_a_reader_of_another_kind_is_refused_unless_both_allow_it(own: Any, others: Any) -> None:
    keys = [reading_key(m, kind, any_kind=each) for m, kind, each in (own, others)]
    target, other = Runner("target", key=keys[0]), Runner("reader", engine(hybrid(1)), key=keys[1])

    async def story(target: Runner, sources: Any, _: Any) -> None:
        stats = await target.ask([reader(sources[0])], 1)
        assert "another kind of machine" in stats.read_reason and stats.resume_exact
        assert "rows alone" in stats.read_reason

    try:
        play(story, other.reading, target=target)
    finally:
        other.compute.close()


def test_a_reader_that_stops_in_the_middle(runners: list[Runner]) -> None:
    class Dying(SERVICER):
        async def Read(self, requests: Any, context: Any) -> AsyncIterator[pb.ReadReply]:
            count = 0
            async for reply in runners[0].reading.Read(requests, context):
                yield reply
                count += reply.ends
                if count == 2:
                    return

    async def story(target: Runner, sources: Any, _: Any) -> None:
        for k in (0, 2):
            stats = await target.ask([reader(sources[0])], k)
            assert "rows alone" in stats.read_reason
            # gRPC's word for it, where a forward is written to a stream that has ended.
            ends = ("its stream ended", "Internal error from Core")
            assert any(each in stats.read_reason for each in ends)
            await until_free(runners[0])

    play(story, Dying())


def test_a_server_that_is_gone(runners: list[Runner]) -> None:
    async def story(target: Runner, sources: Any, servers: list[grpc.aio.Server]) -> None:
        await servers[0].stop(None)
        stats = await target.ask([reader(sources[0])], 1)
        assert "its runner does not answer" in stats.read_reason

    play(story, runners[0].reading)


async def _silent(_requests: Any, _context: Any) -> AsyncIterator[pb.ReadReply]:
    await asyncio.sleep(3600)
    yield pb.ReadReply()


async def _pulsing(_requests: Any, _context: Any) -> AsyncIterator[pb.ReadReply]:
    while True:
        yield pb.ReadReply()
        await asyncio.sleep(0.01)


async def _dripping(requests: Any, _context: Any) -> AsyncIterator[pb.ReadReply]:
    """The length of a header, and then a byte of it at a time."""
    async for request in requests:
        if request.HasField("frame"):
            break
    yield pb.ReadReply(data=(1 << 20).to_bytes(8, "little"))
    while True:
        await asyncio.sleep(0.05)
        yield pb.ReadReply(data=b" ")


async def _noise(requests: Any, _context: Any) -> AsyncIterator[pb.ReadReply]:
    async for request in requests:
        if request.HasField("frame"):
            yield pb.ReadReply(data=b"noise" * 1000, ends=True)


async def _too_early(_requests: Any, _context: Any) -> AsyncIterator[pb.ReadReply]:
    yield pb.ReadReply(data=b"noise")
    await asyncio.sleep(3600)


async def _failing(_requests: Any, _context: Any) -> AsyncIterator[pb.ReadReply]:
    await asyncio.sleep(0.3)  # gRPC loses the reason of a call that ends while it is written to
    raise RuntimeError("a defect")
    yield


@pytest.mark.parametrize(
    ("serve", "why"),
    [
        (_silent, "takes too long"),
        (_pulsing, "returned no forward within"),
        (_dripping, "returned no forward within"),
        (_noise, "no safetensors"),
        (_too_early, "more than it was sent"),
        (_failing, "unknown"),
    ],
)
def test_readers_that_hang_or_lie(serve: Serve, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_readers, "OPENING_S", 1.0)
    monkeypatch.setattr(remote_readers, "SILENCE_S", 1.0)
    monkeypatch.setattr(remote_readers, "FORWARD_S", 1.0)

    class Other(SERVICER):
        async def Read(self, requests: Any, context: Any) -> AsyncIterator[pb.ReadReply]:
            async for reply in serve(requests, context):
                yield reply

    async def story(target: Runner, sources: Any, _: Any) -> None:
        stats = await target.ask([reader(sources[0])], 1)
        assert "rows alone" in stats.read_reason and why in stats.read_reason

    play(story, Other())


@pytest.mark.parametrize("error", [NumericError("no number"), RuntimeError("of the device")])
def test_rows_that_cannot_be_sent_are_read_alone(
    runners: list[Runner], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes are made on another thread, when the forward is under way."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(shared_reading, "require_finite", fail)

    async def story(target: Runner, sources: Any, _: Any) -> None:
        stats = await target.ask([reader(sources[0])], 1)
        assert f"the last {len(PROMPT)} rows alone: {error}" in stats.read_reason
        await until_free(runners[0])

    play(story, runners[0].reading)


def test_files_that_cannot_be_made_are_read_alone(
    runners: list[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a reader's device reports an error to the thread that waits for it."""
    monkeypatch.setattr(layer_read, "content_of", _failing_file)
    _send_one_at_a_time(monkeypatch)

    async def story(target: Runner, sources: Any, _: Any) -> None:
        stats = await target.ask([reader(sources[0])], 1)
        assert f"the last {len(PROMPT)} rows alone: " in stats.read_reason
        assert "of the device" in stats.read_reason
        await until_free(runners[0])

    play(story, runners[0].reading)


def _send_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another forward is written to a call as it ends, gRPC loses the reader's reason."""
    monkeypatch.setattr(shared_reading, "AHEAD", 0)


def _failing_file(*_: object) -> Iterator[bytes]:
    yield b"the beginning"
    raise RuntimeError("of the device")


def test_a_cached_state_that_cannot_be_sent_is_read_alone(
    runners: list[Runner], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its file is made on another thread, before anything comes back."""

    async def story(target: Runner, sources: Any, _: Any) -> None:
        _ = await target.ask([], 1)
        monkeypatch.setattr(shared_reading, "content_of", _failing_file)
        longer = [*PROMPT, *words(CHUNK * 4, 3)]
        stats = await target.ask([reader(sources[0])], 1, longer)
        assert "rows alone: of the device" in stats.read_reason
        (logged,) = [each.exc_info for each in caplog.records if each.exc_info]
        assert logged[0] is RuntimeError, "a defect would be found by its traceback"
        await until_free(runners[0])

    play(story, runners[0].reading)


@pytest.mark.parametrize("module", [remote_readers, read_service], ids=["target", "reader"])
@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("of the device")])
def test_tensors_that_cannot_be_taken_are_read_alone(
    runners: list[Runner], error: Exception, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread copies them for the device."""

    class NoRoom(DeviceBytes):
        @classmethod
        def of(cls, tensors: Any) -> Any:
            raise error

    monkeypatch.setattr(module, "DeviceBytes", NoRoom)
    _send_one_at_a_time(monkeypatch)

    async def story(target: Runner, sources: Any, _: Any) -> None:
        stats = await target.ask([reader(sources[0])], 1)
        assert f"the last {len(PROMPT)} rows alone: " in stats.read_reason
        assert str(error) in stats.read_reason
        await until_free(runners[0])

    play(story, runners[0].reading)


@pytest.mark.parametrize("serve", [_pulsing, _silent])
def test_no_read_is_cut(
    runners: list[Runner], serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a reading, and where a reader is given up."""
    cut = list[object]()
    monkeypatch.setattr(remote_readers, "OPENING_S", 1.0)
    monkeypatch.setattr(remote_readers, "FORWARD_S", 1.0)
    noting = noting_cut_reads(peer_pb2_grpc.ReadingStub, "Read", cut)
    monkeypatch.setattr(peer_pb2_grpc, "ReadingStub", noting)

    class Lost(SERVICER):
        async def Read(self, requests: Any, context: Any) -> AsyncIterator[pb.ReadReply]:
            async for reply in serve(requests, context):
                yield reply

    async def story(target: Runner, sources: Any, _: Any) -> None:
        assert list((await target.ask([reader(sources[0])])).read_by) == [NODE]
        await until_free(runners[0])
        stats = await target.ask([reader(sources[1])], prompt=PROMPT[::-1])
        assert "rows alone" in stats.read_reason

    play(story, runners[0].reading, Lost())
    assert cut == []


def test_a_read_that_ends_leaves_its_caller_s_next_message_to_the_call(
    runners: list[Runner],
) -> None:
    cut = list[object]()

    async def run() -> None:
        ended = asyncio.Event()

        async def requests() -> AsyncIterator[pb.ReadRequest]:
            yield _begin()
            try:
                _ = await ended.wait()
            except asyncio.CancelledError as fault:
                cut.append(fault)
                raise

        replies = runners[0].reading.Read(requests(), ANY)
        assert await anext(replies) == pb.ReadReply()
        await replies.aclose()  # pyright: ignore[reportAttributeAccessIssue]
        await until_free(runners[0])
        assert cut == [] and len(asyncio.all_tasks()) == 2
        ended.set()
        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_cancelled_answer_frees_its_reader(runners: list[Runner]) -> None:
    async def story(target: Runner, sources: Any, _: Any) -> None:
        wire = wire_of("target", [reader(sources[0])], 0, [*PROMPT, *words(CHUNK * 12, 4)])
        events = target.service.Generate(wire, ANY)
        async for event in events:
            if event.prefill.done > CHUNK * 2:
                break
        await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]
        await until_free(target)
        await until_free(runners[0])

    play(story, runners[0].reading)


def _begin(**fields: Any) -> pb.ReadRequest:
    good: dict[str, Any] = {
        "placement": "reader", "key": KEY, "request": "r", "attempt": 1,
        "first_layer": 2, "end_layer": 4, "tokens": PROMPT,
        "schedule": [CHUNK, 140, CHUNK, CHUNK, CHUNK, CHUNK, 7],
    }  # fmt: skip
    if "tokens" in fields:
        good["schedule"] = [len(fields["tokens"])]
    return pb.ReadRequest(begin=pb.ReadBegin(**(good | fields)))


FRAME = pb.Frame(placement="reader", request="r", attempt=1)
HIDDEN = pb.Hidden(
    stage=1, rows=CHUNK, dtype=pb.DTYPE_FLOAT32, shape=[1, CHUNK, 64], data=bytes(CHUNK * 256),
    tokens=PROMPT[:CHUNK], reply=pb.REPLY_COMPUTED,
    members=[pb.Member(request="r", attempt=1)],
)  # fmt: skip


def _frame(frame: dict[str, Any] | None = None, **fields: Any) -> pb.ReadRequest:
    changed, hidden = pb.Frame(), pb.Hidden()
    changed.CopyFrom(FRAME)
    hidden.CopyFrom(HIDDEN)
    for name, value in fields.items():
        if isinstance(value, list):
            hidden.ClearField(name)  # pyright: ignore[reportArgumentType]
            getattr(hidden, name).extend(value)
        else:
            setattr(hidden, name, value)
    changed.hidden.CopyFrom(hidden)
    for name, value in (frame or {}).items():
        setattr(changed, name, value)
    return pb.ReadRequest(frame=changed)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "another placement"),
        ([_begin(placement="other")], "another placement"),
        ([_begin(key="other")], "another model"),
        ([_begin(request="a b")], "name of a request"),
        ([_begin(attempt=0)], "name of a request"),
        ([_begin(attempt=2**63)], "attempt is"),
        ([_begin(first_layer=0)], "upper ones here"),
        ([_begin(first_layer=4)], "upper ones here"),
        ([_begin(end_layer=5)], "upper ones here"),
        ([_begin(tokens=[])], "1 to 4096 ids"),
        ([_begin(tokens=[4096])], "1 to 4096 ids"),
        ([_begin(tokens=[5] * 4097)], "1 to 4096 ids"),
        ([_begin(schedule=[])], "add up"),
        ([_begin(schedule=[CHUNK])], "add up"),
        ([_begin(schedule=[300, CHUNK, CHUNK, CHUNK, CHUNK, 7])], "add up"),
        ([_begin(schedule=[0, *[CHUNK] * 5, 147])], "add up"),
        ([_begin(rows=160), _frame()], "state after the first rows is missing"),
        ([_begin(rows=160), pb.ReadRequest(prefix=pb.FileChunk(data=b"noise" * 9))], "safetensors"),
        ([_begin(rows=160), pb.ReadRequest(prefix=pb.FileChunk())], "ends too early"),
        ([_begin(), _begin()], "a forward has hidden states"),
        ([_begin(), _frame({"request": "s"})], "another request"),
        ([_begin(), _frame({"placement": "s"})], "another placement"),
        ([_begin(), _frame(stage=2)], "hidden.stage"),
        ([_begin(), _frame(dtype=pb.DTYPE_FLOAT16)], "hidden.dtype"),
        ([_begin(), _frame(shape=[1, CHUNK, 63])], "hidden.shape"),
        ([_begin(), _frame(tokens=PROMPT[1 : CHUNK + 1])], "not the prompt's"),
        ([_begin(), _frame(), _frame()], "no forward after"),
        ([_begin(), _frame(members=[pb.Member(request="r", attempt=1, position=9)])], "no forward"),
        ([_begin(), _frame(reply=pb.REPLY_ALL)], "no forward after"),
    ],
)  # fmt: skip
def test_messages_that_are_refused(
    runners: list[Runner], messages: list[pb.ReadRequest], why: str
) -> None:
    async def story(_target: Runner, sources: Any, _: Any) -> None:
        credentials = channel_credentials(runner_credentials(NODE, CLUSTER))
        async with connected(sources[0], credentials) as channel:
            call = peer_pb2_grpc.ReadingStub(channel).Read()
            for each in messages:
                await call.write(each)
            if not messages:
                await call.done_writing()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                while isinstance(await call.read(), pb.ReadReply):
                    pass
            assert why in (raised.value.details() or ""), raised.value.details()
        await until_free(runners[0])

    play(story, runners[0].reading)


def test_no_more_prompts_than_there_is_room_for(runners: list[Runner]) -> None:
    async def story(_target: Runner, sources: Any, _: Any) -> None:
        credentials = channel_credentials(runner_credentials(NODE, CLUSTER))
        async with connected(sources[0], credentials) as channel:
            calls = [peer_pb2_grpc.ReadingStub(channel).Read() for _ in range(MOST_READS + 1)]
            for number, call in enumerate(calls):
                await call.write(_begin(request=f"r{number}"))
                if number < MOST_READS:
                    assert isinstance(await call.read(), pb.ReadReply)  # it lives
            with pytest.raises(grpc.aio.AioRpcError, match="read for others already"):
                _ = await calls[-1].read()
            for call in calls:
                _ = call.cancel()
        await until_free(runners[0])

    play(story, runners[0].reading)


def test_a_reader_without_room_is_not_waited_for(runners: list[Runner]) -> None:
    """Its own prompts have all of its context's rows."""
    scheduler: Any = runners[0].engine._engine.scheduler  # pyright: ignore[reportPrivateUsage]
    scheduler._context_rows = 1000

    async def story(target: Runner, sources: Any, _: Any) -> None:
        credentials = channel_credentials(runner_credentials(NODE, CLUSTER))
        async with connected(sources[0], credentials) as channel:
            call = peer_pb2_grpc.ReadingStub(channel).Read()
            await call.write(_begin(request="another"))
            assert isinstance(await call.read(), pb.ReadReply)
            stats = await target.ask([reader(sources[0])], 1)
            assert "no room for the prompt" in stats.read_reason
            _ = call.cancel()
        await until_free(runners[0])

    play(story, runners[0].reading)
