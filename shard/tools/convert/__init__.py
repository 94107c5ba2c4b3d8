"""Checkpoints made of others: quantised, and with an MTP head brought back.

convert.py: a quantised copy, a few tensors at a time
graft.py: a head of one checkpoint put beside another
main.py: the child process of `exo-node models graft` and `convert`
same_model.py: whether a head belongs to a checkpoint
"""
