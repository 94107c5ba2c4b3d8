"""`exo-node bench mtp`: a child process that times drafting against none.

main.py: the child process
output.py: tables, JSON, CSV
plot.py: the figure
report.py: the arithmetic
request.py: what it is asked
sweep.py: the arms, timed in turns
"""
