"""The models that this node knows.

library.py: models by id or folder, from cards, folders and the hub's cache
"""
