"""Requests that the steps of one engine answer, as the compute thread has it: one step a turn."""

# pyright: reportPrivateUsage=false

from collections.abc import Callable, Sequence

from readers import Reader

from exo_node.shard.engine.request import Request
from exo_node.shard.engine.text_engine import TextEngine


def driven(
    served: TextEngine, readers: Sequence[Reader], each: Callable[[int], None] = lambda _: None
) -> None:
    """Steps the engine of a whole model until each reader's answer ended.

    Readers begin, end and stall at turns; one that stalls is told on, and takes nothing.
    """
    coming, running = list(readers), list[tuple[Reader, Request]]()
    for turn in range(100_000):
        for reader in [reader for reader in coming if reader.begins <= turn]:
            coming.remove(reader)
            running.append((reader, begun(served, reader)))
        for reader, asked in running:
            if turn == reader.ends:
                served.cancel(asked)
            if turn not in reader.stalls:
                asked.events_read = asked.events_delivered
        over = not coming and all(asked.phase == "finished" for _, asked in running)
        if not served._engine.step() and over:
            return
        each(turn)
    raise AssertionError("they do not end")


def begun(served: TextEngine, reader: Reader) -> Request:
    """The reader's request, for the engine's own steps to answer."""

    def on_end(fault: BaseException | None) -> None:
        reader.fault = fault

    return served.begin(reader.request, reader.take, on_end)
