"""Caches whose rows can be taken back, of one request and of several.

batch_caches.py: caches of several requests, each after its own past
batch_slots.py: requests join and leave a batch in place
positions.py: the number of rows of each request of a batch
rollback.py: removes rows from caches, bit for bit
window.py: the cache of a sliding window, whose rows can be taken back
"""
