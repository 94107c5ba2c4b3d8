"""The exchange between the stages of a model: frames, streams, and the ring of stages.

copy_query.py: the copies that all stages compute exactly
frames.py: tensor frames: cut, checked, joined
link.py: the first stage's connection to the others, and the blocks in flight there
ring.py: gRPC streams between runners, and the first stage's end of them
seen_attempts.py: refuses frames of old attempts
stage_queue.py: the order of jobs for a stage's compute thread
"""
