"""How many tokens a round drafts, and which are copied. Pure: no clock, no arrays.

batch_depth.py: how many tokens a batch drafts
batch_lookup.py: the rounds of a batch: drafts of the head, and who copies
costs.py: measured costs of rounds
depth.py: how many tokens a round drafts: fixed, or the best by measured costs
lookup.py: where the last tokens of a request occurred before
lookup_drafts.py: drafts of a request that are copied from its prompt and answer
lookup_length.py: how many tokens a round copies, by evidence and measured costs
"""
