"""Requests that the steps of one engine answer, as the compute thread has it: one step a turn."""

# pyright: reportPrivateUsage=false

from collections.abc import Callable, Sequence

from readers import Reader

from exo_node.shard.engine.answers.text_engine import TextEngine
from exo_node.shard.engine.request import Request


def driven(
    served: TextEngine, readers: Sequence[Reader], each: Callable[[int], None] = lambda _: None
) -> None:
    """Steps the engine of a whole model until each reader's answer ended.

    Readers begin, end and stall at turns; a stalled one still gets events, and reads none.
    """
    coming, running = list(readers), list[tuple[Reader, Request]]()
    for turn in range(100_000):
        for reader in [reader for reader in coming if reader.begins <= turn]:
            coming.remove(reader)
            running.append((reader, begin(served, reader)))
        for reader, request in running:
            if turn == reader.ends:
                served.cancel(request)
            if turn not in reader.stalls:
                request.events_read = request.events_delivered
        over = not coming and all(request.phase == "finished" for _, request in running)
        if not served._engine.step() and over:
            return
        each(turn)
    raise AssertionError("they do not end")


def begin(served: TextEngine, reader: Reader) -> Request:
    """The reader's request, for the engine's own steps to answer."""

    def on_end(fault: BaseException | None) -> None:
        reader.fault = fault

    return served.begin(reader.request, reader.take, on_end)
