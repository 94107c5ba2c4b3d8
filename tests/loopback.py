"""The other stages of a pipeline in this process: a `Link` over real `StageWorker`s, no sockets.

Blocks still travel as frames (cut, checked, put together), so that what is tested is what runs.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from exo_node.placement.errors import ExoNodeError
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.pipeline.frames import Assembler, HiddenBlock, check_envelope, cut
from exo_node.shard.pipeline.stage import StageWorker


class LoopbackLink:
    """Runs every stage at once when the generator sends; errors go into the future."""

    def __init__(
        self,
        workers: Sequence[StageWorker],
        expectations: Sequence[StageLimits],
        observe: Callable[[pb.Frame], None] = lambda _: None,
    ) -> None:
        self._workers = workers
        self._expectations = expectations
        self._observe = observe

    def send(self, block: HiddenBlock) -> "Future[HiddenBlock] | None":
        future: Future[HiddenBlock] = Future()
        try:
            back = self._through(block)
        except ExoNodeError as fault:
            future.set_exception(fault)
            return future
        if block.reply == pb.REPLY_NONE:
            assert not back
            return None
        assert len(back) == 1
        # The way back is checked as the generator's runner checks it: for the stage after the last.
        last = self._expectations[-1]
        future.set_result(self._carry(back[0], replace(last, stage=last.stage + 1)))
        return future

    def send_chunk(self, block: HiddenBlock) -> "Future[None]":
        """What a stage refuses is raised at once."""
        (back,) = self._through(block)
        last = self._expectations[-1]
        wire = (last.placement, last.stage + 1, last.dtype, last.hidden_size)
        (told,) = cut(back, *wire)
        assert told.computed.position == block.position
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def check(self, request: str, attempt: int) -> None:
        """What fails is raised where it happens."""

    def send_all(self, blocks: Sequence[HiddenBlock]) -> "list[Future[HiddenBlock]]":
        """What a stage refuses comes back in the block's own future."""
        futures = {block.request: Future[HiddenBlock]() for block in blocks}
        for worker, expected in zip(self._workers, self._expectations, strict=True):
            carried = [self._carry(block, expected) for block in blocks]
            blocks = list[HiddenBlock]()
            for block, outcome in zip(carried, worker.forward_all(carried), strict=True):
                if isinstance(outcome, Exception):
                    futures[block.request].set_exception(outcome)
                else:
                    blocks += outcome
        last = self._expectations[-1]
        for block in blocks:
            back = self._carry(block, replace(last, stage=last.stage + 1))
            futures[block.request].set_result(back)
        return list(futures.values())

    def rollback(self, request: str, attempt: int, position: int) -> None:
        for worker in self._workers:
            worker.rollback(request, attempt, position)

    def held_by_all(
        self,
        request: str,
        attempt: int,
        ids: Sequence[int],
        schedule: Sequence[int],
        held: Sequence[int],
    ) -> "Future[list[int]]":
        left, future = list(held), Future[list[int]]()
        for worker, e in zip(self._workers, self._expectations, strict=True):
            query = pb.PrefixQuery(tokens=ids, schedule=schedule, held=left)
            frame = pb.Frame(placement=e.placement, request=request, attempt=attempt, prefix=query)
            check_envelope(frame, e)
            self._observe(frame)
            left = worker.held(request, attempt, query.tokens, query.schedule, query.held)
        future.set_result(left)
        return future

    def release(self, request: str, attempt: int) -> None:
        for worker in self._workers:
            worker.release(request, attempt)

    def _through(self, block: HiddenBlock) -> list[HiddenBlock]:
        """What leaves the last stage."""
        blocks = [block]
        for worker, expected in zip(self._workers, self._expectations, strict=True):
            blocks = [out for b in blocks for out in worker.forward(self._carry(b, expected))]
        return blocks

    def _carry(self, block: HiddenBlock, e: StageLimits) -> HiddenBlock:
        assembler = Assembler(e)
        for frame in cut(block, e.placement, e.stage, e.dtype, e.hidden_size):
            if e in self._expectations:  # not on the way back to the generator
                self._observe(frame)
            if (whole := assembler.add(frame)) is not None:
                return whole
        raise AssertionError("the block's frames did not make a block")
