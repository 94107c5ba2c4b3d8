"""gRPC channels between nodes and runners, and the errors of failed calls."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from datetime import UTC, datetime
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from ...placement.errors import (
    ExoNodeError,
    InvalidRequest,
    OtherCluster,
    PeerLost,
    PeerRefused,
    Untrusted,
    from_code,
)
from ...proto.bounds import fault as number_fault
from ...proto.grpc_options import CHANNEL_OPTIONS
from ..trust.certificates import Credentials, channel_credentials, clock_trouble

_LOG = logging.getLogger(__name__)
Reply = TypeVar("Reply")
_Message = TypeVar("_Message", bound=Message)
NODE_CHANNEL_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.max_reconnect_backoff_ms", 1000))
# Parts of gRPC's text where one side does not accept a certificate. "Handshake read failed" is no
# such part: the other process ended during the handshake.
_UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "SSL_ERROR_SSL", "Peer name")
_EXPIRED = ("certificate has expired", "certificate is not yet valid")
_REFUSED = "Connection refused"
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_END = object()


def from_status(fault: grpc.aio.AioRpcError, where: str) -> ExoNodeError:
    """The error that a call's status carries as metadata, or the one that its code means."""
    metadata = {key: value for key, value in fault.trailing_metadata() or ()}
    if (code := metadata.get("exo-code")) is not None:
        param = metadata.get("exo-param") or None
        return from_code(str(code), fault.details() or "", str(param) if param else None)
    detail = (fault.details() or "").split("\n")[0]
    if any(sign in detail for sign in _UNTRUSTED):
        return _why_untrusted(where, detail)
    if fault.code() is grpc.StatusCode.UNAVAILABLE and _REFUSED in detail:
        return PeerRefused(f"nobody listens at {where}")
    _LOG.debug("%s: %s: %s", where, fault.code().name, detail)
    if fault.code() in _GONE:
        return PeerLost(f"{where} is gone or does not answer")
    return ExoNodeError(f"{where} failed; see its log")


def _why_untrusted(where: str, detail: str) -> Untrusted:
    if clock := clock_trouble(datetime.now(UTC)):
        return Untrusted(f"{where} cannot be trusted: {clock}")
    if any(sign in detail for sign in _EXPIRED):
        return Untrusted(
            f"{where} showed a certificate that is not valid today ({detail}): compare the clocks "
            "of both machines"
        )
    return OtherCluster(
        f"{where} is not of this cluster ({detail}); give both the same key, and compare their "
        "clocks if they have it"
    )


class Channels:
    """Open channels by address and expected name."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = channel_credentials(credentials)
        self._channels: dict[tuple[str, str, bool, bool], grpc.aio.Channel] = {}

    def to(
        self, address: str, name: str, *, beats: bool = False, bulk: bool = False
    ) -> grpc.aio.Channel:
        """The channel to host:port, where the certificate must carry `name`.

        `beats`: a connection for heartbeats alone, which no number of other calls can delay.
        `bulk`: one for files, which delay no other call.
        """
        key = (address, name, beats, bulk)
        if key not in self._channels:
            options = [*NODE_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name)]
            if beats or bulk:  # else channels to the same target share one connection
                options.append(("grpc.use_local_subchannel_pool", 1))
            if beats:
                # Short: the next heartbeat dials again instead of failing by the last refusal.
                options.append(("grpc.initial_reconnect_backoff_ms", 200))
            self._channels[key] = grpc.aio.secure_channel(address, self._credentials, options)
        return self._channels[key]

    async def drop(self, address: str) -> None:
        """Closes the channels to an address that will not be used again."""
        for key in [key for key in self._channels if key[0] == address]:
            await self._channels.pop(key).close()

    async def close(self, keep: Collection[str] = ()) -> None:
        """Closes the channels to all hosts but those to `keep`; calls over them end."""
        ended = [key for key in self._channels if key[0].rpartition(":")[0] not in keep]
        channels = [self._channels.pop(key) for key in ended]
        _ = await asyncio.gather(*(channel.close() for channel in channels))


def checked(message: _Message, sender: str) -> _Message:
    """The same message. Raises InvalidRequest where a number in it is out of its bounds."""
    if (wrong := number_fault(message)) is not None:
        text = f"{sender} sent {wrong.field} that {wrong.text}; nothing of that message counts"
        raise InvalidRequest(text, param=wrong.field)
    return message


async def reply(call: Awaitable[Reply], where: str) -> Reply:
    """Returns the reply of a unary call. Raises ExoNodeError."""
    try:
        return await call
    except grpc.aio.AioRpcError as fault:
        raise from_status(fault, where) from fault
    except asyncio.CancelledError as fault:
        if _cancelled_here():
            raise
        raise PeerLost(f"{where} is gone") from fault


async def stream(
    method: Callable[[Any], Any], request: Any, where: str, *, lost: type[PeerLost] = PeerLost
) -> AsyncGenerator[Any, None]:
    """Calls a method and yields its messages; an early end from either side leaves nothing running.

    Raises ExoNodeError, and `lost` where the other side is gone.
    """
    call = method(request)
    messages = aiter(call)
    reading: asyncio.Task[Any] | None = None
    try:
        while True:
            # gRPC never frees the operation of a read whose awaiter is cancelled (grpc/grpc#43360).
            # So a cancel ends the call, which ends the read as well.
            reading = asyncio.ensure_future(anext(messages, _END))
            if (message := await asyncio.shield(reading)) is _END:
                return
            yield message
    except grpc.aio.AioRpcError as fault:
        raise _lost_as(from_status(fault, where), fault, lost) from fault
    except asyncio.CancelledError as fault:
        if _cancelled_here():
            raise
        raise lost(f"{where} is gone") from fault
    finally:
        call.cancel()
        if reading is not None:
            _ = await asyncio.wait([reading])
            if not reading.cancelled():
                _ = reading.exception()  # marks it as retrieved
        # The call and its iterator refer to each other: without this, one that was not read to its
        # end keeps its request and its last answer until the garbage collector runs.
        await messages.aclose()


def _lost_as(
    error: ExoNodeError, fault: grpc.aio.AioRpcError, lost: type[PeerLost]
) -> ExoNodeError:
    """`error`, or `lost` in its place where this side noticed that the other one is gone."""
    is_local = not any(key == "exo-code" for key, _ in fault.trailing_metadata() or ())
    if is_local and type(error) in (PeerLost, PeerRefused) and lost is not PeerLost:
        return lost(error.message)
    return error


def _cancelled_here() -> bool:
    """Whether this task is cancelled. If not, gRPC raises CancelledError for a channel that was
    closed here, because its runner is gone.

    The handlers raise by themselves: an exception that was an argument of the function that raises
    it would be referred to by its own traceback.
    """
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())
