"""The decode engine: answers, from token ids to text and stats, and a stage's part of them.

answer_reads.py: answers that are read again as prompts, for the next turn
answers.py: one answer between engine and reader: its events, and the reader's handle
batch.py: requests that share forwards, and their rounds
borders.py: the states behind a prompt that all stages of a pipeline cache
cache_parts.py: parts of a request's caches, copied for the prefix cache
cache_set.py: the caches of one request or of several
compute.py: the one thread that owns MLX
draft_profile.py: measured costs, acceptance and identity of a model, which outlive restarts
drafter.py: drafts for the requests of a batch
drafting.py: whether a request drafts, how much, and why not
embedding_engine.py: embeddings of inputs that are read as prompts
engine.py: the loop: plan, issue, read, commit, deliver
events.py: events of an answer
executor.py: carries out steps on this node's device
flight.py: work in flight
groups.py: the requests that share forwards, and the states of the others
issued_round.py: a round in flight, and its outcome
lookup_control.py: whether a request copies drafts from its own tokens
loop_guard.py: ends an answer that repeats itself
model_measurements.py: exactness of drafts and batches, and costs of rounds, before requests
options.py: the engine's part of a stage's specification
pipeline_executor.py: carries out steps over several nodes
prefill_forward.py: a forward over prompts, some layers at a time
prefix_cache.py: the prefix cache in memory
prefix_disk.py: prefixes on disk, for the next process
prefix_encoding.py: what a file of a prefix contains
prefix_export.py: a cached state as one file, for another replica's runner
prefix_import.py: which states another runner may send
prefix_lookup.py: how much of a prompt is cached, without a wait for the compute thread
prefix_store.py: finds and keeps prefixes in memory and on disk
prefix_tree.py: the nodes of the prefix cache
probing.py: measurements before the first request
prompt_images.py: the images of one request's prompt
prompt_path.py: the forwards over a prompt, and the names of the states behind them
prompt_scores.py: log-probabilities of a prompt's tokens
public_faults.py: the errors that readers get
request.py: a request: its parameters and its progress
request_limits.py: the limits of a request to a model
round_plan.py: the drafts of a batch's next round, and whose they are
scheduler.py: decides which requests run next
spans.py: rows of cached prompts, and the bytes that caches take for them
stage.py: a stage behind the first one: blocks, requests, leases
stage_rounds.py: forwards of one stage's layers
state.py: the state of one request
step_outcome.py: the outcome of a piece of work for a request
step_times.py: the median plain step of the last answer
text_engine.py: answers requests, from ids to text and stats
unread_rows.py: rows of a batch that its draft head has not read
"""
