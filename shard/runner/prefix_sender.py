"""Sends cached states to the runners of other replicas, as files of the disk tier."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Final

from ...placement.errors import InvalidRequest, PeerLost, StateLost
from ...proto import peer_pb2 as pb
from ..checkpoint.files import Buffer
from ..engine.compute import ComputeThread
from ..engine.prefixes.lookup import PrefixLookup
from ..model.stage_limits import StageLimits

CHUNK_BYTES: Final = 1 << 20
"""The limit of one message."""
MAX_READERS: Final = 4
"""States that are sent at the same time: each keeps its arrays in memory until it is sent."""


class PrefixSender:
    """Streams states of one whole model. Without a reader nothing of a stream is left."""

    def __init__(
        self, limits: StageLimits, key: str, lookup: PrefixLookup, compute: ComputeThread
    ) -> None:
        """`key`: see `persistent_files.shared_prefix_key`."""
        self._limits = limits
        self.key = key
        self._lookup = lookup
        self._compute = compute
        self._readers = 0

    async def send(self, request: pb.PrefixRequest) -> AsyncGenerator[pb.FileChunk, None]:
        """The file's content. Raises ExoNodeError.

        The compute thread only looks up the arrays; checksums and pieces are made on other threads.
        """
        self._check(request)
        self._readers += 1
        try:
            find = partial(
                self._lookup.export,
                self.key,
                list(request.tokens),
                request.cache_salt,
                drafts=request.drafts,
            )
            pieces = await asyncio.wrap_future(self._compute.submit(find))
            if pieces is None:
                raise StateLost("the state behind the prompt is not cached any more")
            async with aclosing(_chunks(pieces())) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._readers -= 1

    def _check(self, request: pb.PrefixRequest) -> None:
        if request.placement != self._limits.placement:
            # The port of a runner that is gone may be another's by now.
            raise PeerLost("another placement's runner listens here now")
        if request.key != self.key:
            raise InvalidRequest(
                "this runner's states are of another model, or of another kind of machine",
                param="key",
            )
        if any(token >= self._limits.vocabulary for token in request.tokens):
            raise InvalidRequest("tokens must be in the vocabulary", param="tokens")
        if self._readers >= MAX_READERS:
            raise PeerLost(f"{MAX_READERS} states are being sent already")


async def _chunks(pieces: Iterator[Buffer]) -> AsyncGenerator[pb.FileChunk, None]:
    """Messages of at most CHUNK_BYTES. Each piece is made when the reader has taken the last."""
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        for begin in range(0, len(piece), CHUNK_BYTES):
            yield pb.FileChunk(data=bytes(piece[begin : begin + CHUNK_BYTES]))
