"""Prompts that several runners read together: the answering one the lower layers, readers the rest.

layer_read.py: some layers of a prompt that another runner answers
layer_rows.py: rows and states of some layers' caches, as they travel and as they are checked
link.py: the readers of one prompt, as the engine sees them
shared_reading.py: a prompt that is read with readers, on the answering runner
views.py: parts of a whole model's layers, over the same weights
"""
