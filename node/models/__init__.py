"""The models that this node knows.

checking.py: a checkpoint's pre-flight
entries.py: a model as lists of models show it
file_facts.py: facts of a model's files that lists show
head_source.py: where an MTP head is taken from
library.py: models by id, from cards, folders and the hub's cache
on_this_machine.py: lists of models without a running node
places.py: where models lie on this machine
pulling.py: models brought and deleted by a command
recommending.py: which models to propose
user_cards.py: a person's own cards
"""
