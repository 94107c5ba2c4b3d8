"""Servers under load, as `exo-node bench serve` measures them.

answer.py: one streamed answer, read from its events
arguments.py: the flags as values
command.py: the command
facts.py: machines, models and versions, without names
figures.py: what is computed from the answers of a run
record.py: the runs so far, made into a result
result.py: the JSON file
result_page.py: the page of a result
runs.py: closed loops of clients
server.py: requests to a server
session.py: a bench from its first request to its files
workload_tables.py: the tables of a result
workloads.py: the conversations
"""
