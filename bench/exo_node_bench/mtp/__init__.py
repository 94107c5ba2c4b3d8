"""`exo-node bench mtp`: a child process that compares speed with and without drafts.

command.py: the command
main.py: the child process
output.py: tables, JSON, CSV
plot.py: the figure
report.py: the arithmetic
request.py: its request
sweep.py: runs and times the arms in turns
"""
