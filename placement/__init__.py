"""Where a model runs: cards, costs, the exact planner; pure but for reading card files.

candidates.py: single nodes and pipelines with their costs
card.py: ModelCard and NativeMtp, derived or written down
chunk.py: how many rows of a prompt one forward reads
cluster.py: what the planner is told of nodes
config.py: a checkpoint's config.json, read as hostile input
context.py: how long a context is that nobody asked for
cost.py: bytes on a node, and seconds a token of a list of stages
drafting.py: whether a request drafts, and why not
dtype.py: the dtype that a placement computes in
dtype_bytes.py: bytes of one number, by dtype
errors.py: the error tree, drawn in its docstring
fitting.py: whether a model fits, in short
ids.py: names that several processes use
library.py: cards from TOML files
options.py: what may be asked of a placement, checked
plan.py: the choice
reasons.py: what a person is told of it
search.py: the cheapest pipeline, exact
spares.py: which nodes hold warm spares
split.py: how many layers each stage gets
split_refusal.py: at which layers a model may be split
tour.py: the cheapest way round every set of nodes
weighing.py: the placements that come into question, in every dtype
"""
