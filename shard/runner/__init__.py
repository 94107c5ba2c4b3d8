"""The runner: the child process of a node that holds one stage.

generator_service.py: the gRPC service that generates
generator_wire.py: requests, events and stats as messages
main.py: the child process
stage_service.py: the gRPC services of a stage and of the runner itself
standby_service.py: the gRPC service by which a spare follows a stage
"""
