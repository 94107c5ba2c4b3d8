"""Answers, from token ids to text and stats, and a stage's part of them.

batch.py: requests that share forwards, and their rounds
cache_parts.py: parts of a request's caches, kept apart from it
cache_set.py: the caches of one request or of several
compute.py: the one thread that owns MLX
draft_profile.py: costs, acceptance and identity of a model on this machine, kept over restarts
drafter.py: drafts of the requests of a batch
drafting.py: who drafts for a request, how much, and why nobody does
engine.py: the loop: plan, issue, read, commit, deliver
events.py: what the engine tells of an answer
executor.py: carries steps out on this machine's device
groups.py: which requests share forwards, and the states of the others
options.py: what a stage's specification says of its engine
outcome.py: what a piece of work gave a request
pipeline_executor.py: carries steps out over several nodes
prefix_cache.py: the state behind prompts that were read, for prompts that begin alike
prefix_disk.py: prefixes on disk, for the next process
prefix_store.py: what is kept of prompts, in memory and on disk
prefix_tree.py: the nodes of the prefix cache
probing.py: what is measured before the first request
reading.py: a forward over prompts, some layers at a time
request.py: a request, as it is asked and as it runs
request_limits.py: what a request may ask of a model
scheduler.py: who runs next
spans.py: rows of kept prompts, and the bytes that caches take for theirs
stage.py: what a stage does with a block: sessions, forwards, leases
stage_prefixes.py: what a pipeline's stages keep of prompts
stage_rounds.py: forwards of one stage's layers
state.py: the state of one request
targets.py: a whole model: ids in, logits out
text_engine.py: requests answered, from ids to text and stats
"""
