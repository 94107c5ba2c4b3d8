"""Plans which layers of a long prompt other nodes compute. Pure.

The answering node keeps the lower layers and the readers get the rest, in chunks that are under way
at once. So a prompt takes as long as all parts take for one chunk, and from then on as the slowest
part, or link, takes for each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING, Final

from .cluster import LinkFacts, layer_range
from .cost import sane
from .ids import NodeId

if TYPE_CHECKING:
    from .card import ModelCard

WORTHWHILE: Final = 0.9
"""Readers are asked where they are expected to need at most this part of the time."""
CHUNK_S: Final = 0.002
"""Seconds of a chunk's way to a reader and back, beside the link."""
STATE_NUMBERS: Final = 320
"""Numbers of a recurrent layer's state, in float32, for each of a hidden state: Qwen3.6-27B has
307 (48 layers, 75 MB)."""
FILE_BYTES_S: Final = 300e6
"""Bytes a second of what a reader sends that are packed, checked and unpacked beside the layers,
however fast the link is: what two H200s of one host reached (2.7 GB in 9.0 s, read alone 8.9)."""
ANY_KIND: Final = "any-"
MOST_READERS: Final = 4
MIN_FORWARDS: Final = 3
"""Forwards over the rest of a prompt, below which it is read alone: the first and the last one wait
for each other."""


def may_read(own: str, other: str) -> bool:
    """Whether a runner with the key `other` may read for one with `own`: see `reading_key`."""
    return own == other or (own.startswith(ANY_KIND) and _model_of(own) == _model_of(other))


def reading_key(model: str, machine: str, *, any_kind: bool) -> str:
    """The name of a runner's states. `model`: a hash of all that decides them but for the machine;
    `machine`: of the kind that computes them. `any_kind`: whether it reads with other kinds, so
    that its states may be mixed: then only others that allow it have the same name."""
    return f"{ANY_KIND * any_kind}{model}-{machine}"


def _model_of(key: str) -> str:
    return key.rpartition("-")[0]


@dataclass(frozen=True, slots=True)
class ReaderNode:
    """A node that may read for another one."""

    node: NodeId
    row_s: float
    """Seconds of a layer for a row, beside what the node does already."""
    round_trip_s: float
    bandwidth: float
    """Bytes a second between it and the answering node."""
    first_layer: int = 1
    """The first layer that it has; the others follow, up to the last."""


@dataclass(frozen=True, slots=True)
class ReadingSizes:
    """The sizes of one model that decide what reading a prompt takes."""

    layers: int
    chunk: int
    """Rows of a forward."""
    row_bytes: float
    """Bytes that a row adds to a mean layer's cache."""
    hidden_bytes: int
    """Bytes of a row's hidden state."""
    state_bytes: float
    """Bytes of a mean layer's state that is not divided by rows."""
    drafts: bool = True
    """Whether the hidden states of all rows return for the draft head."""

    @classmethod
    def of(cls, card: "ModelCard", chunk: int) -> "ReadingSizes":
        share = card.num_attention_layers / card.num_layers
        return cls(
            layers=card.num_layers,
            chunk=chunk,
            row_bytes=card.kv_bytes_per_layer_token * share,
            hidden_bytes=card.hidden_bytes,
            state_bytes=STATE_NUMBERS * 4 * card.hidden_size * (1 - share),
            drafts=card.native_mtp is not None,
        )


@dataclass(frozen=True, slots=True)
class ReaderLayers:
    """The layers [first, end) that a node computes of a prompt."""

    node: NodeId
    first_layer: int
    end_layer: int


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """The nodes that read a prompt, and the reason."""

    readers: tuple[ReaderLayers, ...]
    """In the order of their layers; empty if the answering node reads alone."""
    seconds: float
    """The seconds that reading is expected to take."""
    reason: str
    """The reason for it, in words."""


ALONE: Final = ReadingPlan((), 0.0, "")
"""The plan where no other node may read."""


def reader_of(
    node: NodeId, row_s: float, links: Sequence[LinkFacts], busy: int = 0, first_layer: int = 1
) -> ReaderNode | None:
    """A node as a reader; None without a measured link. `busy`: the answers and prompts there, each
    of which leaves it a part of its speed. `first_layer`: see `ReaderNode`."""
    measured = [link for link in links if sane(link.bandwidth, 0.0)]
    if not measured or not sane(row_s, 0.0):
        return None
    best = max(measured, key=lambda link: link.bandwidth)
    return ReaderNode(
        node, row_s * (1 + busy), sane(best.round_trip_s, 0.0), best.bandwidth, first_layer
    )


def plan_reading(
    rows: int,
    cached_rows: int,
    own_row_s: float,
    readers: Sequence[ReaderNode],
    sizes: ReadingSizes,
    names: Mapping[NodeId, str],
) -> ReadingPlan:
    """The quickest way to read a prompt of `rows` rows after those that are cached.

    `own_row_s`: seconds of a layer for a row on the answering node. Of more readers the fastest
    MOST_READERS are used; the plan is the best of all splits of each number of them, in that order.
    """
    rest = rows - cached_rows
    alone_s = rest * own_row_s * sizes.layers
    if not readers:
        return ReadingPlan((), alone_s, "")
    if (forwards := ceil(rest / sizes.chunk)) < MIN_FORWARDS:
        why = f"alone: {rest} tokens are {forwards} forward{'s'[forwards == 1 :]}, too few to share"
        return ReadingPlan((), alone_s, why)
    fastest = sorted(readers, key=lambda reader: (reader.row_s, reader.node))[:MOST_READERS]
    best_s, best = alone_s, tuple[tuple[ReaderNode, int], ...]()
    for count in range(1, min(len(fastest), sizes.layers - 1) + 1):
        chosen = sorted(fastest[:count], key=lambda reader: reader.first_layer)
        for counts in _splits(own_row_s, chosen, sizes.layers):
            parts = tuple(zip(chosen, counts[1:], strict=True))
            seconds = _seconds(rest, cached_rows, own_row_s, counts[0], parts, sizes)
            if seconds < best_s:
                best_s, best = seconds, parts
    if not best or best_s > WORTHWHILE * alone_s:
        return ReadingPlan(
            (), alone_s, f"alone: {rest} tokens take {alone_s:.1f} s, with others {best_s:.1f} s"
        )
    layers, first = list[ReaderLayers](), sizes.layers - sum(count for _, count in best)
    for reader, count in best:
        layers.append(ReaderLayers(reader.node, first, first + count))
        first += count
    who = " and ".join(
        f"{names.get(each.node, each.node)} ({layer_range(each.first_layer, each.end_layer)})"
        for each in layers
    )
    reason = f"with {who}: {rest} tokens take {best_s:.1f} s, alone {alone_s:.1f} s"
    return ReadingPlan(tuple(layers), best_s, reason)


def _splits(
    own_row_s: float, readers: Sequence[ReaderNode], layers: int
) -> Iterator[tuple[int, ...]]:
    """The layers that each node computes, for each time that a part may take for a row: as many as
    fit into it, the fastest node filled first, at least one each, which the node has."""
    paces = [own_row_s, *(reader.row_s for reader in readers)]
    order = sorted(range(len(paces)), key=lambda index: paces[index])
    most = [layers, *(layers - reader.first_layer for reader in readers)]
    limits = sorted({pace * count for pace in paces for count in range(1, layers)})
    for limit in limits:
        counts, rest = [1] * len(paces), layers - len(paces)
        for index in order:
            more = min(rest, most[index] - 1, int(limit / paces[index] + 1e-9) - 1)
            counts[index] += max(0, more)
            rest -= max(0, more)
        firsts = accumulate(counts[:-1])
        if rest == 0 and all(
            first >= reader.first_layer for first, reader in zip(firsts, readers, strict=True)
        ):
            yield tuple(counts)


def _seconds(
    rows: int,
    cached_rows: int,
    own_row_s: float,
    own_layers: int,
    parts: Sequence[tuple[ReaderNode, int]],
    sizes: ReadingSizes,
) -> float:
    """Seconds to read `rows` rows, the state after `cached_rows` sent before."""
    chunk = min(sizes.chunk, rows)
    computing = [own_row_s * own_layers * chunk]
    links, before, after, round_trip = list[float](), 0.0, 0.0, 0.0
    for number, (reader, count) in enumerate(parts):
        computing.append(reader.row_s * count * chunk)
        returns_hidden = sizes.drafts or number < len(parts) - 1
        nbytes = count * sizes.row_bytes + sizes.hidden_bytes * (1 + returns_hidden)
        rate, states = min(reader.bandwidth, FILE_BYTES_S), count * sizes.state_bytes
        links.append(nbytes * chunk / rate)
        before += (count * sizes.row_bytes * cached_rows + states * (cached_rows > 0)) / rate
        after += states / rate
        round_trip += reader.round_trip_s + CHUNK_S
    # All links end at the answering node, which may have one port.
    slowest = max(*computing, sum(links))
    chunks = ceil(rows / chunk)
    fill = sum(computing) + sum(links) + round_trip
    return before + fill + (chunks - 1) * slowest + after
