"""What the stages of a model exchange: frames, streams, and the ring round them.

frames.py: tensor frames: cut, checked, joined
link.py: the generator's way through the other stages, and what is on that way
ring.py: the generator's end of the streams
seen_attempts.py: which attempts are over
stage_queue.py: what waits for a stage's compute thread, and in which order
streams.py: gRPC streams between runners
"""
