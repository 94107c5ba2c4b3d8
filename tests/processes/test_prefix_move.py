"""Two runner processes of one model: a conversation moves, and its prompt is not read again."""

import asyncio

from prefixes import CHUNK, SECOND, TOKENS
from runners import Placement, running
from small import LAYERS, expected, small_checkpoint

from exo_node.proto import peer_pb2 as pb


async def test_a_conversation_moves_with_its_state() -> None:
    fields = {"native_mtp": True, "prefill_chunk": CHUNK, "prefix_cache_bytes": 256 << 20}
    bounds, folder = (0, LAYERS), small_checkpoint()

    async def ask(runner: Placement, k: int, source: Placement | None = None) -> pb.Stats:
        moved = {}
        if source is not None:
            ready = source.endpoints[0].ready
            moved["prefix_source"] = pb.PrefixSource(
                placement=source.name, ready=ready, node=source.endpoints[0].node
            )
        got = await runner.answer(SECOND, max_tokens=TOKENS, num_draft_tokens=k, **moved)
        assert got.finished is not None
        assert tuple(got.ids) == expected(SECOND, TOKENS, chunk=CHUNK).ids
        return got.finished.stats

    async with (
        running(bounds, folder, **fields, placement="first") as first,
        running(bounds, folder, **fields, placement="second") as second,
    ):
        assert (await ask(first, 2)).cached_tier == ""
        wire = first.request(SECOND, num_draft_tokens=2)
        prefixes = [await first.client.find_prefix(first.endpoints[0], wire)]
        wire.placement = second.name
        prefixes.append(await second.client.find_prefix(second.endpoints[0], wire))
        assert [prefix.rows for prefix in prefixes] == [460, 0]
        assert prefixes[0].key == prefixes[1].key != ""
        for tier in ("peer", "memory"):
            stats = await ask(second, 2, first)
            assert (stats.cached_tokens, stats.cached_tier) == (460, tier)
        async with asyncio.timeout(60):
            while (await second.inspect()).prefix_memory_rows != 460:
                await asyncio.sleep(0.05)
        state = await second.inspect()
        assert (state.prefix_peer_rows, state.prefix_disk_rows) == (460, 0)
