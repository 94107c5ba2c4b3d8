"""Strict mode: every decode forward has the same number of rows, whatever is drafted.

Backends choose kernels by the row count, also for what is written into the caches. With padding
behind the real rows, plain steps and verifies run the same kernels, so drafts cannot change a row's
numbers. Masks are causal and recurrences run forwards: a row never sees the padding behind it.
`probe.fixed_rows_identity` measures whether a backend keeps to that.
"""

from collections.abc import Generator

import mlx.core as mx

from .seams import Block, Verifier, Wait, Want

PADDING_ID = 0
"""Any id of the vocabulary would do: what padding computes is discarded."""


class FixedRows:
    """A Verifier of `rows` rows a decode forward over `inner`, which can take rows back.

    Caches take rows back once per forward only, and the loop may want that for rejected drafts. So
    padding waits for the loop's rollback and goes with it, or goes before what comes next.
    """

    def __init__(self, inner: Verifier, rows: int) -> None:
        """`rows`: the most drafts a round may have, and one. Forwards of prompts stay as wide."""
        if rows < 1:
            raise ValueError(f"strict mode needs 1 row or more in a forward, not {rows}")
        self.overlaps = inner.overlaps
        self.takes_back = inner.takes_back
        self._inner = inner
        self._rows = rows
        self._padding = 0

    @property
    def position(self) -> int:
        return self._inner.position - self._padding

    def forward(self, tokens: mx.array, *, want: Want) -> Generator[Wait, None, Block]:
        """As the seam has it. Raises ValueError for more rows than a decode forward has."""
        self._drop_padding()
        if want != "all":
            return (yield from self._inner.forward(tokens, want=want))
        real = tokens.shape[0]
        padding = self._rows - real
        if padding < 0:
            raise ValueError(
                f"{real} rows do not fit into strict mode's forwards of {self._rows}: draft at "
                f"most {self._rows - 1} tokens a round"
            )
        if padding:
            rest = mx.full((padding,), PADDING_ID, dtype=tokens.dtype)
            tokens = mx.concatenate([tokens, rest])
        block = yield from self._inner.forward(tokens, want=want)
        self._padding = padding
        hidden = None if block.hidden is None else block.hidden[:, :real]
        return Block(block.logits[:real], hidden)

    def rollback(self, rows: int) -> None:
        self._inner.rollback(rows + self._padding)
        self._padding = 0

    def arrays(self) -> list[mx.array]:
        """The caches without padding. Rows of the last forward cannot be taken back after it."""
        self._drop_padding()
        return self._inner.arrays()

    def _drop_padding(self) -> None:
        if self._padding:
            self.rollback(0)
