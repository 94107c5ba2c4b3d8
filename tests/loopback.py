"""The other stages of a pipeline in this process: a `StageLink` of real `StageWorker`s.

Blocks still travel as frames (cut, checked, put together), so that what is tested is what runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from exo_node.placement.errors import ExoNodeError
from exo_node.proto import peer_pb2 as pb
from exo_node.shard.engine.stage import StageWorker
from exo_node.shard.model.stage_limits import StageLimits
from exo_node.shard.pipeline.frames import Assembler, HiddenBlock, check_envelope, cut
from exo_node.shard.pipeline.link import Key, Trip


class LoopbackLink:
    """Runs every stage at once when the generator sends: each trip is back when it sets out."""

    def __init__(
        self,
        workers: Sequence[StageWorker],
        expectations: Sequence[StageLimits],
        observe: Callable[[pb.Frame], None] = lambda _: None,
    ) -> None:
        self._workers = workers
        self._expectations = expectations
        self._observe = observe

    def listen(self, on_back: Callable[[], None]) -> None:
        """Nothing comes back later."""

    def send(self, block: HiddenBlock) -> Trip:
        trip = Trip(tuple(member.key for member in block.members), block.members[0].position)
        back: HiddenBlock | None = block
        for worker, expected in zip(self._workers, self._expectations, strict=True):
            if back is None:
                break
            carried = self._carry(back, expected)
            try:
                passed = worker.forward(carried)
            except (ExoNodeError, RuntimeError) as fault:
                passed_faults, back = [(key, fault) for key in trip.members], None
            else:
                passed_faults, back = passed.faults, passed.block
            for key, fault in passed_faults:
                error = fault if isinstance(fault, ExoNodeError) else ExoNodeError(str(fault))
                _ = trip.fail(key, error)
        if back is not None:
            trip.block = self._returned(back)
        trip.is_back = True
        return trip

    def ask_prefixes(
        self, key: Key, ids: Sequence[int], schedule: Sequence[int], ends: Sequence[int]
    ) -> Trip:
        common = list(ends)
        for worker, e in zip(self._workers, self._expectations, strict=True):
            query = pb.PrefixQuery(tokens=ids, schedule=schedule, held=common)
            frame = pb.Frame(placement=e.placement, request=key[0], attempt=key[1], prefix=query)
            check_envelope(frame, e)
            self._observe(frame)
            common = worker.cached_ends(key, query.tokens, query.schedule, query.held)
        return Trip((key,), is_back=True, prefix_rows=common)

    def release(self, key: Key) -> None:
        for worker in self._workers:
            worker.release(key)

    def _returned(self, block: HiddenBlock) -> HiddenBlock | None:
        """The way back is checked as the generator's runner checks it."""
        last = self._expectations[-1]
        behind = replace(last, stage=last.stage + 1)
        if block.data:
            return self._carry(block, behind)
        (frame,) = cut(block, behind.placement, behind.stage, behind.dtype, behind.hidden_size)
        assert frame.computed.position == block.members[0].position
        return None

    def _carry(self, block: HiddenBlock, e: StageLimits) -> HiddenBlock:
        assembler = Assembler(e)
        for frame in cut(block, e.placement, e.stage, e.dtype, e.hidden_size):
            if e in self._expectations:  # not on the way back to the generator
                self._observe(frame)
            if (whole := assembler.add(frame)) is not None:
                return whole
        raise AssertionError("the block's frames did not make a block")
