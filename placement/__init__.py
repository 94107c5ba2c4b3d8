"""Chooses where a model runs: cards, costs, the planner. Pure except for reading card files.

candidates.py: single nodes and pipelines with their costs
card.py: ModelCard and NativeMtp, derived or written down
chunk.py: rows of a prompt in one forward
cluster.py: facts on nodes and links, the planner's input
config.py: a checkpoint's config.json, read as hostile input
context.py: the context length where none is requested
cost.py: bytes on a node, and seconds a token of a list of stages
drafting.py: whether a request drafts, with the reason
dtype_bytes.py: bytes of one number, by dtype
errors.py: the error tree, drawn in its docstring
fitting.py: whether a model fits, for lists of models
gpu_faults.py: faults of a GPU, and the shorter chunks that avoid them
ids.py: names that several processes use
kv_bits.py: the bits of attention's caches in a placement
library.py: cards from TOML files and config.json, with one sentence about the first fault
options.py: the options of a placement, checked
plan.py: the choice
reader_choice.py: the nodes of a cluster that read prompts of a model together
reading.py: which layers of a long prompt other nodes compute
reasons.py: the reasons of a choice, for a person
sampling_values.py: the sampling that a publisher suggests, and where each value comes from
search.py: the cheapest pipeline, exact for up to eight nodes
split_refusal.py: the layers at which a model may be split
weighing.py: the dtypes that a placement may compute in, and all candidates ranked over them
"""
