"""One answer, from token ids to text and stats.

admission.py: which requests may hold rows in the caches at once
attempts.py: one attempt at an answer, of a model that is here whole or over stages
batching.py: which answers are decoded together
cache_parts.py: parts of a request's caches, kept apart from it
compute.py: the one thread that owns MLX
draft_profile.py: costs, acceptance and identity of a model on this machine, kept over restarts
drafting.py: who drafts for a request, how much, and why nobody does
earlier.py: what an answer may go on from: a prefix of its prompt
engine.py: one answer: prefill, rounds, text, stats
events.py: what the engine tells of an answer
live.py: the attempts that run
local.py: the Verifier of a model that is here whole
options.py: what a stage's specification says of its engine
prefix_cache.py: the state behind prompts that were read, for prompts that begin alike
prefix_disk.py: prefixes on disk, for the next process
prefix_tree.py: the nodes of the prefix cache
probing.py: what is measured before the first request
request.py: what the engine is asked
request_limits.py: what a request may ask of a model
spans.py: rows of kept prompts, and the bytes that caches take for theirs
stage_prefixes.py: what a pipeline's stage keeps of prompts
"""
