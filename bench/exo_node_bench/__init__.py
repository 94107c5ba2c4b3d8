"""The commands `exo-node bench mtp` and `exo-node bench serve`.

prompts.py: prompts from a file, and the bundled ones
"""
