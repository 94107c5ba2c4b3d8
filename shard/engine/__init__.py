"""One answer, from token ids to text and stats.

admission.py: which requests over stages may hold rows in the caches at once
batch.py: requests that share forwards, and their rounds
cache_parts.py: parts of a request's caches, kept apart from it
cache_set.py: the caches of one request or of several
compute.py: the one thread that owns MLX
draft_profile.py: costs, acceptance and identity of a model on this machine, kept over restarts
drafter.py: drafts of the requests of a batch
drafting.py: who drafts for a request, how much, and why nobody does
earlier.py: prefixes of prompts over stages, on the generator
engine.py: the loop: plan, issue, read, commit, deliver
events.py: what the engine tells of an answer
executor.py: carries steps out on this machine's device
options.py: what a stage's specification says of its engine
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
stage_prefixes.py: what a pipeline's stage keeps of prompts
staged_answer.py: plain decoding over several stages
state.py: the state of one request
targets.py: a whole model: ids in, logits out
text_engine.py: requests answered, from ids to text and stats
"""
