"""A prompt that is read with readers, on the runner that answers it.

Its own layers are the lower ones; the forwards' hidden states go to the readers, and what these add
to their layers' caches comes back, so that in the end the whole state is here as if it had been
read alone. Own layers are ahead by a few forwards; whatever becomes of the readers, the state after
the last forward of which all came back can be made again.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple, cast

import mlx.core as mx

from ....mtp.caches.rollback import holds_rows
from ....mtp.seams import ForwardOutput, Want
from ....placement.cluster import layer_range
from ....placement.errors import ExoNodeError
from ....proto import peer_pb2 as pb
from ...checkpoint.files import Buffer
from ...model.tensors import require_finite
from ...pipeline.frames import BlockMember, HiddenBlock
from ..prefixes.borders import Borders
from ..prefixes.memory import is_worth
from ..states.state import DraftState, State
from .layer_read import selection_of
from .layer_rows import CacheMark, LayerParts, Selection, as_marked, content_of, extended
from .link import Readers, ReadTrip
from .views import LayerViews, PartReader

AHEAD: Final = 4
"""Forwards that may be under way beside one for each reader: so all have work, even while one with
recurrent states comes back from a GPU, for as long as three forwards take, and few wait."""


@dataclass(slots=True, eq=False)
class SentForward:
    """A forward whose rows the readers have."""

    end: int
    selection: Selection
    own: Sequence[CacheMark]
    """The own layers' caches after it."""
    trip: ReadTrip


class LandedForward(NamedTuple):
    """A forward of which all came back."""

    begin: int
    end: int
    output: ForwardOutput | None
    """The whole model's output; None where it is not needed."""


class _Mark(NamedTuple):
    """The whole state after a forward, while later ones write to its caches."""

    rows: int
    caches: Sequence[CacheMark]
    draft: DraftState | None
    draft_room: CacheMark | None


class SharedReading:
    """All methods run on the compute thread."""

    def __init__(
        self,
        views: LayerViews,
        readers: Readers,
        state: State,
        prompt: Sequence[int],
        ends: Sequence[int],
        borders: Borders,
        name: tuple[str, int],
    ) -> None:
        """`state`: the whole one, after the rows of a cached prefix. `ends`: the row after each
        forward over `prompt`. `borders`: the states that may be worth caching. `name`: the
        request's, and its attempt. Raises one of `views.VIEW_FAULTS`."""
        self._views, self._readers, self._prompt = views, readers, prompt
        self._borders, self._name = borders, name
        self.state = state
        """The whole state; after rows that came back, but for own layers, which are ahead."""
        border = readers.layers[0].first
        views.check(0, border)
        parts = [views.part(*layers) for layers in readers.layers]
        lower = views.part(0, border)
        self.target = PartReader(lower, last_apart=views.reads_last_apart)
        self.is_closed = False
        """Whether it has ended, and nothing of it comes back."""
        self._end = border
        self._own, self._theirs = lower.cache_indices, [part.cache_indices for part in parts]
        self._fresh = [part.make_caches for part in parts]
        self._forms = [views.form(*layers) for layers in readers.layers]
        self._under_way = deque[SentForward]()
        self._landed: list[list[LayerParts]] = [[] for _ in parts]
        """The parts of each reader that came back and are in no cache yet. They are joined where a
        whole state is needed, since joining copies all rows."""
        self._mark = self._marked(self._marks(range(len(state.caches))))
        begin = pb.ReadBegin(
            tokens=prompt,
            rows=state.rows,
            hidden=state.draft is not None,
            last_apart=views.reads_last_apart,
            schedule=[end - begin for begin, end in pairwise((0, *ends))],
        )
        readers.open(self._forms, begin, list(self._prefixes()))

    @property
    def lower_state(self) -> State:
        """The own layers' caches, to which the next forward is appended."""
        return State([self.state.caches[index] for index in self._own])

    def close(self) -> None:
        """Frees the readers."""
        self.is_closed = True
        self._readers.close()

    @property
    def has_room(self) -> bool:
        """Whether another forward may be sent now."""
        return len(self._under_way) < len(self._theirs) + AHEAD

    def send(
        self, begin: int, end: int, hidden: mx.array, delta: int, places: tuple[int, ...]
    ) -> SentForward:
        """Sends a forward of the own layers to the readers, while the device may still compute it.

        `delta`, `places`: the positions of its rows.
        """
        is_last, flat = end == len(self._prompt), mx.contiguous(hidden)
        mx.async_eval(flat)
        stage, dtype = f"the answering node ({layer_range(0, self._end)})", self._views.dtype

        def data() -> bytes:
            own = bytes(memoryview(cast("Buffer", flat)))
            require_finite(own, dtype, begin, end - begin, stage)
            return own

        caches = self.lower_state.caches
        border = pb.BORDER_UNSPECIFIED if is_last else self._borders.at(end, self._is_worth)
        block = HiddenBlock(
            (BlockMember(*self._name, begin, delta),),
            end - begin,
            tuple(self._prompt[begin:end]),
            pb.REPLY_LAST if is_last else pb.REPLY_COMPUTED,
            b"",
            places=places,
            border=border,
        )
        selection = selection_of(block, hidden=self.state.draft is not None)
        own = [CacheMark.of(cache, copies=selection.states) for cache in caches]
        forward = SentForward(end, selection, own, self._readers.send(block, data, selection))
        self._under_way.append(forward)
        return forward

    def land(self, forward: SentForward) -> LandedForward:
        """Takes what the readers returned of the first forward under way. Raises ExoNodeError or
        one of `encoding.CONTENT_FAULTS`; then `alone` has the state to continue with."""
        assert forward is self._under_way[0]
        if forward.trip.fault is not None:
            raise forward.trip.fault
        hidden, selection = None, forward.selection
        for number, received in enumerate(forward.trip.results):
            is_last = number == len(self._theirs) - 1
            own = selection if is_last else selection.with_all_hidden()
            self._landed[number].append(self._forms[number].read(received, own))
            hidden = self._landed[number][-1].hidden
        if forward.end == len(self._prompt) or self._is_whole(forward):
            self._join(forward.end)
        self.state.rows = forward.end
        _ = self._under_way.popleft()
        output = None
        if selection.hidden and hidden is not None:
            ids = self._prompt[forward.end - selection.hidden : forward.end]
            want: Want = "last" if forward.end == len(self._prompt) else "none"
            output = self._views.output(ids, hidden, want)
        return LandedForward(selection.begin, forward.end, output)

    def mark(self, forward: SentForward) -> State | None:
        """The whole state after a forward that has landed, to be cached; None where the readers did
        not return a state that some cache needs."""
        if not self._is_whole(forward):
            return None
        theirs = {index for indices in self._theirs for index in indices}
        marks = dict(zip(self._own, forward.own, strict=True))
        marks |= {index: CacheMark.of(self.state.caches[index], copies=True) for index in theirs}
        self._mark = self._marked([marks[index] for index in sorted(marks)])
        return self.alone()

    def alone(self) -> State:
        """The whole state after the last forward that was marked, to continue without readers."""
        mark = self._mark
        caches = [
            as_marked(cache, each, mark.rows)
            for cache, each in zip(self.state.caches, mark.caches, strict=True)
        ]
        draft = None if mark.draft is None else replace(mark.draft, unread=list(mark.draft.unread))
        if draft is not None and draft.cache is not None and mark.draft_room is not None:
            draft.cache = as_marked(draft.cache, mark.draft_room, draft.rows)
        return replace(self.state, caches=caches, rows=mark.rows, draft=draft)

    def _is_whole(self, forward: SentForward) -> bool:
        """Whether the state after a forward is here, once it has landed."""
        return forward.selection.states or all(holds_rows(cache) for cache in self.state.caches)

    def _join(self, end: int) -> None:
        """Adds what has landed to the readers' layers' caches, up to row `end`. Raises one of
        `encoding.CONTENT_FAULTS`; then some of them may have it, and `alone` returns to the mark.
        """
        caches = self.state.caches
        for landed, indices, fresh in zip(self._landed, self._theirs, self._fresh, strict=True):
            grown = extended([caches[index] for index in indices], landed, fresh(), end)
            landed.clear()
            for index, cache in zip(indices, grown, strict=True):
                caches[index] = cache

    def _is_worth(self, rows: int) -> bool:
        form = self._views.form(0, self._views.num_layers)
        return is_worth(form.state_bytes, rows * form.row_bytes, rows)

    def _marks(self, indices: Sequence[int]) -> list[CacheMark]:
        return [CacheMark.of(self.state.caches[index], copies=True) for index in indices]

    def _marked(self, marks: Sequence[CacheMark]) -> _Mark:
        draft, room = self.state.draft, None
        if draft is not None:
            draft = replace(draft, unread=list(draft.unread))
            if draft.cache is not None:
                draft.cache = copy(draft.cache)
                room = CacheMark.of(draft.cache, copies=False)
        return _Mark(self.state.rows, marks, draft, room)

    def _prefixes(self) -> Iterator[Iterator[Buffer]]:
        """The file of each reader's state after the cached rows; none if there are none."""
        rows = self.state.rows
        for indices in self._theirs if rows else ():
            caches = [self.state.caches[index] for index in indices]
            yield content_of(caches, Selection(0, rows, True, 0), None)


def reading_fault(fault: Exception) -> str:
    """Why the rest of a prompt is read alone, for the log."""
    return fault.message if isinstance(fault, ExoNodeError) else str(fault) or type(fault).__name__
