"""The decode engine: rounds of requests from token ids to token ids, and a stage's part of them.

attempts.py: measurements that were under way when their process ended
batch.py: requests that share forwards, and their rounds
compute.py: the one thread that owns MLX
drafter.py: drafts for the requests of a batch
engine.py: the loop: plan, issue, read, commit, deliver
executor.py: carries out steps on this node's device
issued_round.py: a round in flight, and its outcome
layer_engine.py: reads layers of prompts that other runners answer
loop_guard.py: ends an answer that repeats itself
measuring.py: measurements of a stage while it has nothing else to compute
options.py: the engine's part of a stage's specification
pipeline_executor.py: carries out steps over several nodes
prefill_forward.py: a forward over prompts, some layers at a time
prompt_images.py: the images of one request's prompt
prompt_readings.py: the prompts that readers help to read
remote_work.py: work in flight on other stages
request.py: a request: what it asks, and its progress
round_forms.py: how rounds are computed: rows of a forward, and early issue
round_plan.py: the drafts of a batch's next round, and whose they are
scheduler.py: decides which requests run next, and keeps prompts and answers even
split_copies.py: copied drafts over several nodes: which stages verify them, and when they pay
stage.py: a stage after the first one: blocks, requests, leases
stage_copies.py: which copies a stage computes exactly
stage_request.py: a request on a later stage
stage_rounds.py: forwards of one stage's layers
step_outcome.py: the outcome of a piece of work for a request
step_times.py: the median plain step of the last answer
"""
