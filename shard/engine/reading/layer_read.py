"""Some layers of a prompt that another runner answers: their forwards, and the files for it."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx

from ....mtp.seams import ForwardOutput
from ....placement.errors import InvalidFrame
from ....proto import peer_pb2 as pb
from ...checkpoint.files import Buffer
from ...checkpoint.prefix_files import ReceivedPrefix
from ...model.tensors import DTYPES
from ...pipeline.frames import HiddenBlock
from ..prefixes.encoding import DeviceBytes
from ..states.state import State
from .layer_rows import LayerForm, Selection, content_of, extended
from .views import LayerViews, PartReader

Deliver = Callable[[Iterator[Buffer]], None]
"""Takes the file of a forward's results; see `content_of`."""


class LayerRead(PartReader):
    """The layers [first, end) of one prompt. All methods run on the compute thread."""

    def __init__(
        self,
        views: LayerViews,
        begin: pb.ReadBegin,
        prefix: ReceivedPrefix | None,
        deliver: Deliver,
    ) -> None:
        """`prefix`: the state after `begin.rows` rows, or None without any. Raises LoadFailed or
        one of `encoding.CONTENT_FAULTS`."""
        views.check(begin.first_layer, begin.end_layer)
        part = views.part(begin.first_layer, begin.end_layer)
        super().__init__(part, last_apart=begin.last_apart)
        self._views = views
        self._form: LayerForm = views.form(begin.first_layer, begin.end_layer)
        self._returns_hidden = begin.hidden
        self._deliver = deliver
        self._blocks = deque[tuple[HiddenBlock, DeviceBytes]]()
        self.state = State(self._part.make_caches())
        if prefix is not None:
            parts = self._form.read(prefix, Selection(0, begin.rows, True, 0))
            caches = extended(self.state.caches, [parts], self._part.make_caches(), begin.rows)
            self.state = State(caches, begin.rows)

    @property
    def waits(self) -> bool:
        """Whether the rows of its next forward are still to come."""
        return not self._blocks

    def add(
        self,
        block: HiddenBlock,
        hidden: DeviceBytes,
        prompt: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        """Takes the rows of its next forward. Raises InvalidFrame for others.

        `hidden`: the block's data. `ends`: the row after each forward over `prompt`.
        """
        ahead = sum(each.rows for each, _ in self._blocks)
        begin, end = self.state.rows + ahead, block.members[0].position + block.rows
        if block.members[0].position != begin or end not in ends or block.is_round:
            raise InvalidFrame(
                f"the rows from {block.members[0].position} to {end} are no forward after {begin} "
                "rows",
                param="hidden.members.position",
            )
        if list(block.tokens) != list(prompt[begin:end]):
            raise InvalidFrame("the ids of a forward are not the prompt's", param="hidden.tokens")
        self._blocks.append((block, hidden))

    def entering(self) -> mx.array:
        (block, hidden), positions = self._blocks[0], self.rope_positions
        if block.places:
            positions.at(mx.array(block.places, dtype=mx.int32).reshape(3, -1))
        else:
            positions.set_deltas([block.members[0].delta])
        positions.join(block.tokens)
        shape = (1, block.rows, self._views.hidden_size)
        return hidden.array.view(DTYPES[self._views.dtype]).reshape(shape)

    def commit(self, output: ForwardOutput) -> None:
        """Delivers what a computed forward added."""
        block, _ = self._blocks.popleft()
        begin = self.state.rows
        self.state.rows = end = begin + block.rows
        selection = selection_of(block, hidden=self._returns_hidden)
        self._deliver(content_of(self.state.caches, selection, output.hidden))
        assert end == selection.end


def selection_of(block: HiddenBlock, *, hidden: bool) -> Selection:
    """The part of a block's results that its reader returns. `hidden`: whether it has the hidden
    states of all rows, or only of a prompt's last."""
    is_last, begin = block.reply == pb.REPLY_LAST, block.members[0].position
    states = is_last or block.border != pb.BORDER_UNSPECIFIED
    return Selection(begin, begin + block.rows, states, block.rows if hidden else int(is_last))
