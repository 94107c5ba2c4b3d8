"""The runner: a node's child process that runs one stage.

answer_pieces.py: an answer's text as content, reasoning and calls of tools
embedding_service.py: the gRPC service that computes embeddings
encodings.py: the last encoded prompts, and those without a chat template
generator_service.py: the gRPC service that generates
generator_wire.py: requests, events and stats as messages
main.py: the child process
persistent_files.py: files of this machine that outlive a runner
prefix_exchange.py: states from and to other replicas' runners
read_service.py: the gRPC service that computes layers of prompts that other runners answer
refusal.py: ends a gRPC call with an error
remote_readers.py: the calls to the readers of one prompt
runner_service.py: the gRPC service of any runner, and its epoch, which only rises
stage_service.py: the Stage service of the first stage, and the common part of both
state_report.py: the socket to the node, and the state that it is sent
worker_service.py: the Stage service of all other stages
"""
