"""The other stages of a pipeline in this process: a `Link` over real `StageWorker`s, no sockets.

Blocks still travel as frames (cut, checked, put together), so that what is tested is what runs.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from exo_node.placement.errors import ExoNodeError
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.frames import Assembler, Expectation, HiddenBlock, cut
from exo_node.shard.stage import StageWorker


class LoopbackLink:
    """Runs every stage at once when the generator sends; errors go into the future."""

    def __init__(
        self,
        workers: Sequence[StageWorker],
        expectations: Sequence[Expectation],
        observe: Callable[[pb.Frame], None] = lambda _: None,
    ) -> None:
        self._workers = workers
        self._expectations = expectations
        self._observe = observe

    def send(self, block: HiddenBlock) -> "Future[HiddenBlock] | None":
        future: Future[HiddenBlock] = Future()
        out: HiddenBlock | None = block
        try:
            for worker, expected in zip(self._workers, self._expectations, strict=True):
                assert out is not None
                out = worker.forward(self._carry(out, expected))
        except ExoNodeError as fault:
            future.set_exception(fault)
            return future
        if block.reply == pb.REPLY_NONE:
            return None
        assert out is not None
        # The way back is checked as the generator's runner checks it: for the stage after the last.
        last = self._expectations[-1]
        future.set_result(self._carry(out, replace(last, stage=last.stage + 1)))
        return future

    def rollback(self, request: str, attempt: int, position: int) -> None:
        for worker in self._workers:
            worker.rollback(request, attempt, position)

    def release(self, request: str, attempt: int) -> None:
        for worker in self._workers:
            worker.release(request, attempt)

    def _carry(self, block: HiddenBlock, e: Expectation) -> HiddenBlock:
        assembler = Assembler(e)
        for frame in cut(block, e.placement, e.stage, e.dtype, e.hidden_size):
            if e in self._expectations:  # not on the way back to the generator
                self._observe(frame)
            if (whole := assembler.add(frame)) is not None:
                return whole
        raise AssertionError("the block's frames did not make a block")
