"""`exo-node report --share`: a child process that measures what a person may publish.

main.py: the child process
result.py: the file to publish
speeds.py: plain and drafted speed, and the time to the first token
timed_answers.py: answers of an engine with their times
"""
