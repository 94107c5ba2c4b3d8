"""Measures what a stage's layers take at work, to correct what `layer_probe` found.

Only forwards whose end is waited for anyway are timed, so it costs two looks at the clock: a stage
evaluates what it sends on, and the generator of a pipeline its own hidden states. Their tokens are
known before a forward begins, as the loop reads each round's verdict, so nothing of the last
token's lm_head is in them. A single node has no such moment: it evaluates tokens, one forward
ahead, and what lm_head and sampling take of a step cannot be told from the layers' share there.
"""

from collections.abc import Callable, Sequence

from ...placement.correction import LayerMean
from ...proto import peer_pb2 as pb

SHORT_CONTEXT = 1024
"""Rows up to which a forward counts. The probe's caches are empty, as the planner's costs are of a
short context, and attention grows with what is in them: at 1,024 rows by about 4 % of the bytes
that one row reads of an 8B model in 4 bits, so by half of that on average. What comes later in an
answer is not measured rather than scaled by a guess."""
FEWEST_LAYERS = 4
"""Stages of fewer do not measure: hybrid models repeat themselves every four layers, and what a
forward takes beside its layers would count as theirs."""
CHUNK_ROWS = 128
"""Forwards of at least so many rows are observations of their own: one lasts as long as a window of
single rows, and of a prompt two at most have a short context."""


class LayerTimer:
    """Means of the forwards of some numbers of rows; on the compute thread, as its stage is."""

    def __init__(
        self,
        layers: int = 0,
        rows: Sequence[int] = (),
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Of a stage of `layers` layers; `rows`: what counts. Without them nothing is measured."""
        self._layers = layers
        self.now = clock
        """When a forward begins, for `add`."""
        counted = rows if layers >= FEWEST_LAYERS else ()
        self._means = {n: LayerMean(1) if n >= CHUNK_ROWS else LayerMean() for n in counted}

    def add(self, position: int, rows: int, begun: float) -> None:
        """One forward of `rows` rows behind `position` others, all layers of which end now."""
        mean = self._means.get(rows)
        if mean is not None and position + rows <= SHORT_CONTEXT:
            mean.add((self.now() - begun) / self._layers)

    def means(self) -> list[pb.LayerMean]:
        """What is known so far, for the node."""
        return [
            pb.LayerMean(rows=rows, seconds=mean.seconds, count=mean.count)
            for rows, mean in self._means.items()
            if mean.count
        ]
