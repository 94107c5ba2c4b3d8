"""Answers and embeddings: from requests of the service to the engine, and from tokens to text.

answer_reads.py: answers that are read again as prompts, for the next turn
draft_profile.py: measured costs, acceptance and identity of a model, which outlive restarts
drafting.py: whether a request drafts, how much, and why not
embedding_engine.py: embeddings of inputs that are read as prompts
events.py: one answer between engine and reader: its events, and the reader's handle
final_stats.py: the last event of an answer, with its statistics
lookup_control.py: whether a request copies drafts from its own tokens
model_measurements.py: exactness of drafts and batches, and costs of rounds
probing.py: each measurement, once for a profile
public_faults.py: the errors that readers get
request_limits.py: the limits of a request to a model
text_engine.py: answers requests, from ids to text and stats
"""
