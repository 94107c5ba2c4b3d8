"""Models that nodes copy from each other, so that a cluster downloads each of them once.

bringing.py: a stage's model on this disk, from peers before the hub
estimate.py: what a placement has to bring, and how long that may take
folder.py: a copy on its way: what is here, checked, and what is missing
sharing.py: what this node gives of its models' files, and what it refuses
sources.py: which nodes have a model, and how quick the link to each is
"""
