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
from exo_node.shard.pipeline.prefixes import PromptRead
from exo_node.shard.pipeline.replay_buffer import ReplayBuffer
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
        self._trails: dict[tuple[str, int], ReplayBuffer] = {}
        self._awaited: Future[HiddenBlock] | None = None

    def send(self, block: HiddenBlock) -> "Future[HiddenBlock] | None":
        future: Future[HiddenBlock] = Future()
        try:
            back = self._through(0, block)
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
        (back,) = self._through(0, block)
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

    def adopt(
        self,
        request: str,
        attempt: int,
        position: int,
        replay_buffer: ReplayBuffer,
        *,
        answer: bool,
        prefix: PromptRead | None = None,
    ) -> "Future[HiddenBlock] | None":
        """What a stage lacks is sent at once, as far as the one before it has it."""
        told = pb.Adopt(position=position, answer=answer)
        if prefix is not None:
            told.tokens.extend(prefix.ids)
            told.schedule.extend(prefix.schedule)
        ids = {"tokens": told.tokens, "schedule": told.schedule}
        self._trails[request, attempt] = replay_buffer
        self._awaited = Future() if answer else None
        for number, worker in enumerate(self._workers):
            e = self._expectations[number]
            check_envelope(
                pb.Frame(placement=e.placement, request=request, attempt=attempt, adopt=told), e
            )
            held, reply = worker.adopt(request, attempt, position, answer=answer, **ids)
            self._came_back([] if reply is None else [reply])
            if held == position:
                continue
            if number == 0:
                replay_buffer.want(held, position, answer=answer)
                self.relay(request, attempt)
            else:
                before = self._workers[number - 1]
                for block in before.missing(request, attempt, held, position):
                    self._came_back(self._through(number, block))
        return self._awaited

    def relay(self, request: str, attempt: int) -> None:
        for block in self._trails[request, attempt].unsent(attempt):
            self._came_back(self._through(0, block))

    def _came_back(self, blocks: Sequence[HiddenBlock]) -> None:
        for block in blocks:
            assert self._awaited is not None and not self._awaited.done()
            self._awaited.set_result(block)

    def park(self, request: str, attempt: int) -> None:
        del request, attempt

    def release(self, request: str, attempt: int) -> None:
        for worker in self._workers:
            worker.release(request, attempt)

    def _through(self, number: int, block: HiddenBlock) -> list[HiddenBlock]:
        """From stage `number` + 1 on; what leaves the last one."""
        blocks = [block]
        for worker, expected in list(zip(self._workers, self._expectations, strict=True))[number:]:
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
