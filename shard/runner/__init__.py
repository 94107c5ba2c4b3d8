"""The runner: the child process of a node that holds one stage.

answer_pieces.py: an answer's text as content, reasoning and calls of tools
generator_service.py: the gRPC service that generates
generator_wire.py: requests, events and stats as messages
kept_files.py: files of this machine that outlive a runner
main.py: the child process
next_stage.py: the stream to the next stage
refusal.py: calls that end with an error of the tree
ring_service.py: the Stage service of a generator: answers that come round
runner_service.py: the gRPC service of any runner
stage_service.py: what both Stage services do
worker_service.py: the Stage service of all other stages
"""
