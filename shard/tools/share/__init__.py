"""`exo-node report --share`: a child process that measures what a person may publish.

main.py: the child process
result.py: the file to publish
speeds.py: answers of an engine with their times: plain and drafted speed, the first token
"""
