"""The decode engine: answers, from token ids to text and stats, and a stage's part of them.

answer_reads.py: answers that are read again as prompts, for the next turn
answers.py: one answer between engine and reader: its events, and the reader's handle
batch.py: requests that share forwards, and their rounds
compute.py: the one thread that owns MLX
draft_profile.py: measured costs, acceptance and identity of a model, which outlive restarts
drafter.py: drafts for the requests of a batch
drafting.py: whether a request drafts, how much, and why not
embedding_engine.py: embeddings of inputs that are read as prompts
engine.py: the loop: plan, issue, read, commit, deliver
events.py: events of an answer
executor.py: carries out steps on this node's device
fairness.py: whose turn it is: prompts or answers
flight.py: work in flight
grouping.py: the groups of decoding requests that share forwards
issued_round.py: a round in flight, and its outcome
lookup_control.py: whether a request copies drafts from its own tokens
loop_guard.py: ends an answer that repeats itself
model_measurements.py: exactness of drafts and batches, and costs of rounds, before requests
options.py: the engine's part of a stage's specification
parameters.py: what a request asks: groups of its message, and what was made of its prompt
pipeline_executor.py: carries out steps over several nodes
prefill_forward.py: a forward over prompts, some layers at a time
probing.py: measurements before the first request
prompt_images.py: the images of one request's prompt
prompt_scores.py: log-probabilities of a prompt's tokens
public_faults.py: the errors that readers get
request.py: a request: its parameters and its progress
request_limits.py: the limits of a request to a model
round_forms.py: how rounds are computed: rows of a forward, and early issue
round_plan.py: the drafts of a batch's next round, and whose they are
scheduler.py: decides which requests run next
stage.py: a stage after the first one: blocks, requests, leases
stage_rounds.py: forwards of one stage's layers
step_outcome.py: the outcome of a piece of work for a request
step_times.py: the median plain step of the last answer
text_engine.py: answers requests, from ids to text and stats
"""
