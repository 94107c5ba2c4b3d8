"""The runner: a node's child process that runs one stage.

answer_pieces.py: an answer's text as content, reasoning and calls of tools
bare_prompts.py: prompts without a chat template, encoded or decoded
embedding_service.py: the gRPC service that computes embeddings
encodings.py: the last encoded prompts
epoch_fence.py: the epoch of a runner, which only rises
generator_service.py: the gRPC service that generates
generator_wire.py: requests, events and stats as messages
main.py: the child process
next_stage.py: the stream to the next stage
parent.py: the socket to the node
persistent_files.py: files of this machine that outlive a runner
prefix_fetcher.py: fetches states from other replicas' runners
prefix_sender.py: sends states to them
refusal.py: ends a gRPC call with an error
ring_service.py: the Stage service of the first stage: frames from the last one
runner_service.py: the gRPC service of any runner
stage_service.py: the common part of both Stage services
state_report.py: the state that the node is sent
worker_service.py: the Stage service of all other stages
"""
