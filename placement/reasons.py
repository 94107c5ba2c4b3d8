"""Sentences for a person on a plan: why these nodes, why no MTP, why nothing fits."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from .candidates import Candidate, PlacementTask, candidate
from .card import ModelCard
from .cluster import layer_range
from .context import fitting_context
from .cost import ModelSizes
from .drafting import drafter_words, split_reason, undeclared_reason
from .errors import InsufficientMemory
from .kv_bits import KvBits, cached_in
from .options import PlanOptions, usual_context
from .search import EXACT_NODES
from .split_refusal import SplitRefusal

_RAISED = 1.15
"""How far a Mac's limit can be raised: from 84 % of a large memory to 96 %."""


def first_clause(reason: str) -> str:
    """The decision without its conditions and figures, where there is room for one line."""
    return reason.split("; ")[0].split(" (")[0]


def choice_reason(
    task: PlacementTask,
    best: Candidate,
    ranked: Sequence[Candidate],
    floor: float,
    options: PlanOptions,
    refusal: SplitRefusal,
) -> str:
    """Why `best` was chosen from the candidates `ranked`, the best first.

    `floor`: seconds a token that no placement outside the search can beat.
    """
    context, most = task.limits.context, task.card.context_length
    short = ""
    if options.context is None and context < usual_context(task.card):
        short = f", with {context:,} of the model's {most:,} tokens of context for lack of memory"
    if len(best.nodes) == 1:
        text = _why_alone(task, best, ranked, short)
    else:
        text = _why_split(task, best, ranked, options, short)
    if refusal:
        text += f"; not split{' elsewhere' if refusal.borders else ''}: {refusal}"
    if floor < best.seconds and not options.layers:
        text += (
            f"; of more than {EXACT_NODES} nodes, those that compute a layer fastest come first: "
            f"nothing can take less than {floor * 1000:.3g} ms, which may not be reachable"
        )
    return text


def _why_alone(
    task: PlacementTask, best: Candidate, ranked: Sequence[Candidate], short: str
) -> str:
    """`short`: a clause on a shortened context; as in `_why_split`."""
    able = sum(len(other.nodes) == 1 for other in ranked)
    if len(task.limits.nodes) == 1:
        choice = "the only node" if not task.limits.pinned else "the node that was named"
    elif able == 1:
        choice = f"the only one of {len(task.limits.nodes)} nodes with enough memory"
    else:
        choice = f"the fastest of {able} nodes with enough memory"
    if any(len(other.nodes) > 1 for other in ranked):
        choice += ", and quicker than any split"
    text = f"{best}: {choice}{short} ({memory_needed(task)})"
    if best.speedup:
        return f"{text}; {_speedup(task, best)}"
    no_mtp = mtp_off_reason(task, best)
    return f"{text}; no {drafter_words(task.card)}: {no_mtp}" if no_mtp else text


def _why_split(
    task: PlacementTask,
    best: Candidate,
    ranked: Sequence[Candidate],
    options: PlanOptions,
    short: str,
) -> str:
    ranges = ", ".join(
        f"{node.name} {layer_range(stage.first_layer, stage.end_layer)}"
        for node, stage in zip(best.nodes, best.stages, strict=True)
    )
    alone = next((other for other in ranked if len(other.nodes) == 1), None)
    if options.layers:
        cause = "this split was asked for"
    elif options.nodes:
        cause = "these nodes were asked for"
    elif options.min_nodes > 1:
        cause = f"at least {options.min_nodes} nodes were asked for"
    elif alone is not None:
        cause = f"that is quicker than {alone}"
    else:
        cause = f"no node alone has enough memory ({memory_needed(task)})"
    no_mtp = f"; no {drafter_words(task.card)}: it runs only where one node holds the whole model"
    return f"{best}: {ranges}{short}, because {cause}" + (no_mtp if task.card.drafts else "")


def _speedup(task: PlacementTask, single: Candidate) -> str:
    what = drafter_words(task.card)
    if not single.nodes[0].drafts:
        return f"{what} is turned off there"
    profile = single.nodes[0].profile
    measured = profile is not None and (profile.mtp_speedup > 0 or profile.has_verify)
    source = "by measurement" if measured else "assumed"
    if single.speedup <= 1:
        return f"{what} is expected to make it no faster ({source})"
    return f"{what} is expected to make it {single.speedup:.3g} times as fast ({source})"


def drafting_reason(task: PlacementTask, best: Candidate) -> str:
    """Why the model will or will not draft there, with the remedy."""
    if task.card.drafts is None:
        return undeclared_reason(task.card.id)
    return mtp_off_reason(task, best) or _speedup(task, best)


def mtp_off_reason(task: PlacementTask, best: Candidate) -> str:
    """Why what may draft by the card is not loaded; empty where it is."""
    if task.card.drafts is None or best.speedup:
        return ""
    if len(best.nodes) > 1:
        return split_reason(len(best.nodes), drafter_words(task.card))
    node = task.view.node(best.stages[0].node)

    def need_of(context: int) -> int:
        sizes = ModelSizes.of(task.card, context)
        return sizes.need(0, task.card.num_layers, generator=True, mtp=True)

    need = need_of(task.limits.context)
    context = fitting_context(
        task.limits.context, lambda tokens: need_of(tokens) <= node.memory_bytes
    )
    part = drafter_words(task.card) if task.card.drafter else "the MTP head"
    shorter = f"ask for a context of up to {context:,} tokens (context = {context}) or "
    return (
        f"with {part} {task.card.id} needs {_gigabytes_up(need)}, and {node.name} has "
        f"{_gigabytes_down(node.memory_bytes)}; free memory there{', ' if context else ' or '}"
        f"{shorter if context else ''}choose a smaller quantisation"
    )


def caches_reason(card: ModelCard, kv_bits: KvBits) -> str:
    """Why attention's caches are quantised, or are not; empty where nothing asks for it.

    `card`: as it is loaded.
    """
    if not kv_bits.reason:
        return ""
    if not kv_bits.bits:
        return f"attention caches are not quantised: {kv_bits.reason}"
    plain = cached_in(card, 0).kv_bytes_per_layer_token
    share = round(100 * card.kv_bytes_per_layer_token / plain)
    return (
        f"attention caches have {kv_bits.bits} bits a number, {share} % of their bytes in "
        f"{card.dtype}: {kv_bits.reason}"
    )


def wide_dtype_reason(task: PlacementTask, chosen: Candidate) -> str:
    """Why the nodes of `chosen` do not compute in the dtype of `task`, though it is faster."""
    dtype, has = task.card.dtype, sum(node.memory_bytes for node in chosen.nodes)
    need = task.sizes.need(0, task.card.num_layers, generator=True)
    where = chosen.nodes[0].name if len(chosen.nodes) == 1 else "the nodes together"
    if len(chosen.nodes) > 1 and need <= has:
        return f"{dtype}, which is faster there, does not fit this split"
    return (
        f"{dtype}, which is faster there, needs {_gigabytes_up(need)}, and {where} "
        f"{'has' if len(chosen.nodes) == 1 else 'have'} {_gigabytes_down(has)}"
    )


def manual_split(task: PlacementTask, counts: Sequence[int]) -> Candidate:
    """The requested split: `counts` layers on each allowed node, in their order.

    Raises InsufficientMemory naming the first node that its layers do not fit.
    """
    ends = list(accumulate(counts))
    for node, first, end in zip(task.limits.nodes, [0, *ends], ends, strict=False):
        need = task.sizes.need(first, end, generator=first == 0)
        if need > node.memory_bytes:
            ends_too = ", embeddings and lm_head" if first == 0 else ""
            raise InsufficientMemory(
                f"layers gives {node.name} {layer_range(first, end)} of {task.card.id}{ends_too}, "
                f"which need {_gigabytes_up(need)} with {task.limits.context:,} tokens of context "
                f"and headroom, and it has {_gigabytes_down(node.memory_bytes)}; give it fewer "
                "layers or free memory there",
                param="layers",
            )
    return candidate(task, task.limits.nodes, counts)


def insufficient_memory(
    task: PlacementTask, options: PlanOptions, refusal: SplitRefusal
) -> InsufficientMemory:
    """The error for a model that fits nowhere: the memory it needs, what there is, remedies."""
    nodes, most = task.limits.nodes, task.limits.max_stages
    has = ", ".join(f"{node.name} has {_gigabytes_down(node.memory_bytes)}" for node in nodes)
    if task.limits.pinned:
        holders = "set of the nodes that were named"
    else:
        holders = "node" if most == 1 else f"set of {most} nodes or fewer"
    remedies = ["free memory", "add a node", *_raised_limit(task)]
    if options.max_nodes is not None and options.max_nodes < len(nodes):
        remedies.append(f"raise max_nodes = {options.max_nodes}")
    if options.exclude:
        remedies.append("exclude fewer nodes")
    where = " elsewhere" if refusal.borders else ""
    cannot = f" ({task.card.id} is not split{where}: {refusal})" if refusal else ""
    return InsufficientMemory(
        f"{task.card.id} needs {memory_needed(task)}, and no {holders} can hold it{cannot}: "
        f"{has}; {', '.join(remedies)} or choose a smaller quantisation"
    )


def _raised_limit(task: PlacementTask) -> Iterator[str]:
    """How to let a Mac use more of its memory, if that can be enough for a model that just does not
    fit: Metal's limit is 74 to 84 % of the memory, and moves with iogpu.wired_limit_mb."""
    need = task.sizes.need(0, task.card.num_layers, generator=True)
    for node in task.limits.nodes:
        if node.backend == "metal" and need <= node.memory_bytes * _RAISED:
            limit = f"sudo sysctl iogpu.wired_limit_mb={-(-need // 2**20)}"
            yield f"raise Metal's limit on {node.name} (`{limit}`, then restart exo-node there)"
            return


def with_context(fault: InsufficientMemory, context: int) -> InsufficientMemory:
    """`fault` with the longest context that fits; as it is where none does (0)."""
    if not context:
        return fault
    text = f"{fault.message}; it fits with a context of up to {context:,} tokens"
    return InsufficientMemory(f"{text} (context = {context})", param=fault.param)


def memory_needed(task: PlacementTask) -> str:
    """The memory that the whole model takes on one node."""
    need = task.sizes.need(0, task.card.num_layers, generator=True)
    context = f"{task.limits.context:,} tokens of context"
    return f"{_gigabytes_up(need)} for weights, {context} and headroom"


def _gigabytes_up(count: int) -> str:
    """Rounds up; available memory is rounded down, so that a shortage never reads as a fit."""
    return f"{-(-count // 10**7) / 100:.2f} GB"


def _gigabytes_down(count: int) -> str:
    return f"{count // 10**7 / 100:.2f} GB"
