"""The prefix cache: states after the first rows of prompts, in memory and on disk.

borders.py: the states after a prompt's forwards that all stages of a pipeline cache
disk.py: prefixes on disk, for the next process
encoding.py: what a file of a prefix contains
lookup.py: how much of a prompt is cached, and its state as a file from and for other runners
memory.py: the prefixes in memory: a tree of bounded size
prompt_path.py: the forwards over a prompt, and the names of the states after them
store.py: finds and keeps prefixes in memory and on disk
tree.py: the nodes of that tree
"""
