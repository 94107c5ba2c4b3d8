"""`exo-node bench mtp`: a child process that compares speed with and without drafts.

arm_tables.py: the tables of a sweep
command.py: the command
main.py: the child process
report.py: the arithmetic
request.py: its request
result_page.py: the page of a sweep
results.py: the results as JSON and CSV
sweep.py: runs and times the arms in turns
"""
