"""States between two runners over TLS, and sources that hang, die, or send something else.

The runners are services in this process, with the certificates and the ports of real ones.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from cut_reads import noting_cut_reads
from engines import answer, message, request
from prefixes import ALIEN, FIRST, ROOM, SECOND, TOKENS, cold, engine

from exo_node.node.machine.timing import LOCAL
from exo_node.node.rpc.channels import Channels
from exo_node.node.runners.runner_client import Endpoint, RunnerClient
from exo_node.node.trust.certificates import channel_credentials, runner_credentials
from exo_node.node.trust.keys import ClusterKey
from exo_node.placement.errors import InvalidRequest, PeerLost, StateLost
from exo_node.placement.ids import NodeId
from exo_node.proto import peer_pb2 as pb
from exo_node.proto import peer_pb2_grpc
from exo_node.shard.checkpoint.prefix_files import header_of
from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.compute import ComputeThread
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.runner import prefix_exchange
from exo_node.shard.runner.generator_service import GeneratorService
from exo_node.shard.runner.prefix_exchange import PrefixFetcher, PrefixSender

KEY = "the same model"
CLUSTER = ClusterKey(b"0123456789abcdefghij")
NODE = NodeId("a" * 20)
ANY: Any = None
SERVICER: Any = peer_pb2_grpc.GeneratorServicer


@dataclass
class Runner:
    """A generator's service with its engine."""

    placement: str
    key: str = KEY
    engine: TextEngine = field(default_factory=engine)
    compute: ComputeThread = field(default_factory=ComputeThread)

    def __post_init__(self) -> None:
        limits = StageLimits(self.placement, 0, "float32", 64, 160, 4096, 4096)
        lookup = self.engine.prefix_lookup
        self.sender = PrefixSender(limits, self.key, lookup, self.compute)
        credentials = channel_credentials(runner_credentials(NODE, CLUSTER))
        self.fetcher = PrefixFetcher(self.key, credentials, lookup, ROOM, 4096)
        self.service = GeneratorService(
            limits, self.engine, self.compute, ANY, self.sender, self.fetcher
        )

    async def ask(self, prompt: list[int], k: int = 0, **fields: Any) -> pb.Finished:
        """The end of an answer, whose ids are those of a cold engine."""
        wire = _wire(self.placement, prompt, k, **fields)
        ids, finished = list[int](), None
        async for event in self.service.Generate(wire, ANY):
            ids += event.delta.round.tokens
            if event.HasField("finished"):
                finished = event.finished
        assert finished is not None and tuple(ids) == cold(prompt, k)[0]
        return finished


def _wire(placement: str, prompt: list[int], k: int = 0, **fields: Any) -> pb.GenerateRequest:
    return message(
        placement=placement,
        request="r",
        attempt=1,
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.Sampling(top_p=1.0),
        max_tokens=TOKENS,
        num_draft_tokens=k,
        drafting_reason="" if k else "a test",
        **fields,
    )


Story = Callable[[Runner, pb.PrefixSource], Awaitable[None]]


def play(story: Story, source: Any, placement: str = "source") -> None:
    """A target, and where a source is served. Nothing is left of either."""

    async def run() -> None:
        server = grpc.aio.server()
        peer_pb2_grpc.add_GeneratorServicer_to_server(source, server)
        own = runner_credentials(NODE, CLUSTER)
        credentials = grpc.ssl_server_credentials(
            [(own.key_pem, own.certificate_pem)], own.authority_pem, require_client_auth=True
        )
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        ready = pb.LoadReady(host="127.0.0.1", port=port)
        target = Runner("target")
        try:
            async with asyncio.timeout(50):
                wire = pb.PrefixSource(placement=placement, ready=ready, node=NODE)
                await story(target, wire)
        finally:
            await server.stop(None)
            target.compute.close()
        tasks = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
        assert not [each for each in tasks if "prefix" in str(each.get_coro())]

    asyncio.run(run())


@pytest.fixture
def source() -> Any:
    """A runner that has read SECOND, drafting."""
    runner = Runner("source")
    _ = answer(runner.engine, request(SECOND, 2, TOKENS))
    yield runner
    runner.compute.close()


@pytest.mark.parametrize("k", [0, 1, 2, pytest.param(3, marks=pytest.mark.smoke)])
def test_an_answer_begins_after_the_state_of_another_runner(
    k: int, source: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(target: Runner, wire: pb.PrefixSource) -> None:
        with caplog.at_level(logging.INFO):
            finished = await target.ask(SECOND, k, prefix_source=wire)
        assert (finished.stats.cached_tokens, finished.stats.cached_tier) == (460, "peer")
        assert "copied the state after 460 rows" in caplog.text
        again = await target.ask(SECOND, k, prefix_source=wire)
        assert (again.stats.cached_tokens, again.stats.cached_tier) == (460, "memory")
        assert target.engine.prefix_hits == {"peer": 460, "memory": 460}

    play(story, source.service)


def test_a_request_that_uses_no_cache_fetches_nothing(source: Runner) -> None:
    async def story(target: Runner, wire: pb.PrefixSource) -> None:
        finished = await target.ask(SECOND, prefix_source=wire, cache=False)
        assert finished.stats.cached_tokens == 0
        assert target.engine.prefix_cache_bytes == 0

    play(story, source.service)


def test_a_client_finds_prefixes_and_reads_refusals(source: Runner) -> None:
    async def story(target: Runner, wire: pb.PrefixSource) -> None:
        del target
        channels = Channels(runner_credentials(NODE, CLUSTER))
        client, endpoint = RunnerClient(channels, LOCAL), Endpoint(NODE, wire.ready)
        prefix = await client.find_prefix(endpoint, _wire("source", SECOND, 2))
        assert (prefix.prompt_rows, prefix.rows, prefix.tier) == (len(SECOND), 460, "memory")
        assert prefix.key == KEY and prefix.bytes > 0
        with pytest.raises(InvalidRequest):
            _ = await client.find_prefix(endpoint, _wire("another", SECOND))
        await channels.close()
        dead = Endpoint(NODE, pb.LoadReady(host="127.0.0.1", port=1))
        channels = Channels(runner_credentials(NODE, CLUSTER))
        with pytest.raises(PeerLost):
            _ = await RunnerClient(channels, LOCAL).find_prefix(dead, _wire("source", SECOND))
        await channels.close()

    play(story, source.service)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        pytest.param({"key": "another"}, InvalidRequest, marks=pytest.mark.smoke),
        ({"key": ""}, InvalidRequest),
        ({"placement": "another"}, PeerLost),
        ({"tokens": [1 << 20]}, InvalidRequest),
        pytest.param({"tokens": ALIEN}, StateLost, marks=pytest.mark.smoke),
        ({"cache_salt": b"another"}, StateLost),
    ],
    ids=str,
)
def test_the_sender_refuses_what_it_may_not_or_cannot_send(
    changes: dict[str, Any], error: type[Exception], source: Runner
) -> None:
    fields: dict[str, Any] = {"placement": "source", "tokens": SECOND, "key": KEY}

    async def read() -> None:
        async for _ in source.sender.send(pb.PrefixRequest(**(fields | changes))):
            raise AssertionError("it was sent")

    with pytest.raises(error):
        asyncio.run(read())


def test_messages_are_small_and_readers_are_few(
    source: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_exchange, "MAX_READERS", 1)
    monkeypatch.setattr(prefix_exchange, "CHUNK_BYTES", 50_000)
    wire = pb.PrefixRequest(placement="source", tokens=SECOND, key=KEY)

    async def read() -> None:
        first = source.sender.send(wire)
        assert 0 < len((await anext(first)).data) <= 50_000
        with pytest.raises(PeerLost, match="being sent already"):
            _ = await anext(source.sender.send(wire))
        await first.aclose()  # its reader goes away
        sizes = [len(chunk.data) async for chunk in source.sender.send(wire)]
        assert max(sizes) == 50_000 and len(sizes) > 3

    asyncio.run(read())


class Script(SERVICER):
    """A source that sends what a test wants. `chunks`: of a true state of SECOND."""

    def __init__(self, chunks: list[bytes], misbehave: str) -> None:
        self._chunks = chunks
        self._misbehave = misbehave
        self.reads = 0
        self.cancelled = asyncio.Event()

    async def ReadPrefix(
        self, request: pb.PrefixRequest, context: Any
    ) -> AsyncIterator[pb.FileChunk]:
        self.reads += 1
        chunks = [bytearray(chunk) for chunk in self._chunks]
        match self._misbehave:
            case "hangs":
                await self._hang()
            case "hangs in the middle":
                yield pb.FileChunk(data=bytes(chunks[0]))
                await self._hang()
            case "dies":
                yield pb.FileChunk(data=bytes(chunks[0]))
                await context.abort(grpc.StatusCode.UNAVAILABLE, "it died")
            case "ends early":
                chunks.pop()
            case "flips a byte":
                chunks[-1][-1] ^= 1
            case "flips a byte of the header":
                chunks[0][20] ^= 1
            case "sends without end":
                while True:
                    yield pb.FileChunk(data=b" " * (1 << 20))
            case "describes nothing":
                chunks = [bytearray(header_of({}, {}))]
            case "goes on behind the end":
                chunks += [bytearray(1 << 20)] * 1000
            case _:
                pass
        for chunk in chunks:
            yield pb.FileChunk(data=bytes(chunk))

    async def _hang(self) -> None:
        try:
            _ = await asyncio.Event().wait()
        finally:
            self.cancelled.set()


def chunks_of(prompt: list[int], source: Runner) -> list[bytes]:
    pieces = source.engine.prefix_lookup.export(source.key, prompt, drafts=True)
    assert pieces is not None
    data = b"".join(pieces())
    return [data[begin : begin + 50_000] for begin in range(0, len(data), 50_000)]


@pytest.mark.parametrize(
    ("misbehave", "reason"),
    [
        ("hangs", "it takes too long"),
        ("hangs in the middle", "it takes too long"),
        ("dies", "it died"),
        ("ends early", "it ends too early"),
        ("flips a byte", "not those that were written"),
        ("flips a byte of the header", ""),
        ("sends without end", "no safetensors file"),
        pytest.param("describes nothing", "no file of a prefix", marks=pytest.mark.smoke),
        ("goes on behind the end", "more bytes than it describes"),
        ("sends another prompt", "of another prompt"),
        ("has another key", "of another model"),
    ],
)
def test_whatever_the_source_does_the_prompt_is_computed_and_the_log_says_why(
    misbehave: str,
    reason: str,
    source: Runner,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_exchange, "SILENCE_S", 0.5 if "hangs" in misbehave else 30)
    prompt = SECOND
    if misbehave == "sends another prompt":
        prompt = ALIEN
        _ = answer(source.engine, request(ALIEN, 2, TOKENS))
    if misbehave == "has another key":
        source.key = "another model"
    script = Script(chunks_of(prompt, source), misbehave)

    async def story(target: Runner, wire: pb.PrefixSource) -> None:
        finished = await target.ask(SECOND, 2, prefix_source=wire)
        assert (finished.stats.cached_tokens, finished.stats.cached_tier) == (0, "")
        assert script.reads == 1
        assert "was not copied from" in caplog.text and reason in caplog.text
        again = await target.ask(SECOND, 2)
        assert again.stats.cached_tier == "memory"

    play(story, script)


def test_a_trickle_has_a_limit_too(
    source: Runner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No silence is long, yet it would never end."""
    monkeypatch.setattr(prefix_exchange, "FETCH_S", 0.5)

    class Trickle(Script):
        async def ReadPrefix(
            self, request: pb.PrefixRequest, context: Any
        ) -> AsyncIterator[pb.FileChunk]:
            for chunk in self._chunks:
                for byte in chunk:
                    await asyncio.sleep(0.01)
                    yield pb.FileChunk(data=bytes([byte]))

    async def story(target: Runner, wire: pb.PrefixSource) -> None:
        finished = await target.ask(FIRST, prefix_source=wire)
        assert finished.stats.cached_tokens == 0
        assert finished.stats.time_to_first_token_s >= 0.5, "the client waited for that, too"
        assert "it takes too long" in caplog.text

    play(story, Trickle(chunks_of(SECOND, source), ""))


def test_cancelling_a_request_cancels_its_fetch(
    source: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, cut = Script(chunks_of(SECOND, source), "hangs in the middle"), list[object]()
    noting = noting_cut_reads(peer_pb2_grpc.GeneratorStub, "ReadPrefix", cut)
    monkeypatch.setattr(peer_pb2_grpc, "GeneratorStub", noting)

    async def story(target: Runner, wire: pb.PrefixSource) -> None:
        asking = asyncio.create_task(target.ask(SECOND, prefix_source=wire))
        while not script.reads:
            await asyncio.sleep(0.01)
        _ = asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            _ = await asking
        _ = await script.cancelled.wait()
        finished = await target.ask(FIRST)
        assert finished.stats.cached_tokens == 0 and cut == []

    play(story, script)
