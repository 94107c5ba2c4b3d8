"""How many tokens a round drafts, and which are copied. Pure: no clock, no arrays.

acceptance.py: shares of drafts, and of copied tokens, that the target accepted
costs.py: measured seconds of rounds, by their form
depth_reason.py: why rounds draft as many tokens as they do, in words
drafter_comparison.py: which of a model's drafters drafts the next answer
lookup.py: where the last tokens of a request occurred before
lookup_drafts.py: drafts of a request that are copied from its prompt and answer
round_policy.py: the next round of requests: who copies, and how many tokens are drafted
"""
