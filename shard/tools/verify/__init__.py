"""`exo-node verify`: a child process that checks exactness on this machine.

answers.py: checks of answers and samples
main.py: the child process
numbers.py: checks of blocks, rollback
report.py: the report as text and JSON
subject.py: the model under test
"""
