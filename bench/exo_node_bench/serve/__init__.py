"""Servers under load, as `exo-node bench serve` measures them, and the page of results.

answer.py: one streamed answer, read from its events
arguments.py: the flags as values
charts.py: the charts, with matplotlib
command.py: the command
facts.py: machines, models and versions, without names
figures.py: what is computed from the answers of a run
output.py: the folder of the result
page.py: the page to share
record.py: the runs so far, made into a result
result.py: the JSON file
runs.py: closed loops of clients
server.py: requests to a server
session.py: a bench from its first request to its files
tables.py: the tables
workloads.py: the conversations
"""
