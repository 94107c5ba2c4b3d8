"""Makes checkpoints from others: quantised copies, and copies with an MTP head added.

convert.py: makes a quantised copy, a few tensors at a time
graft.py: adds the head of one checkpoint to another
main.py: the child process of `exo-node models graft` and `convert`
same_model.py: checks that a head belongs to a checkpoint
"""
