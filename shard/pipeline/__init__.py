"""Stages that exchange tensors: frames, streams, forwards.

frames.py: tensor frames: cut, checked, joined
meeting.py: where rows of several requests set out together
merged.py: forwards that several requests of a stage share
pacing.py: how many chunks of prompts are under way
prefixes.py: what stages keep of prompts, and go on from
request_state.py: what a stage holds of a request
seen_attempts.py: which attempts are over
stage.py: what a stage does with a frame: sessions, forwards, leases
stage_queue.py: what waits for a stage's compute thread, and in which order
streams.py: gRPC streams between runners
verifier.py: one request of a model in stages
"""
