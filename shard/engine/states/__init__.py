"""The caches of requests: of one, of several, and copied in parts.

cache_parts.py: rows of caches, copied for the prefix cache, and their bytes
cache_set.py: the caches of one request or of several
groups.py: the state of each request, alone or in a group that shares forwards
state.py: the state of one request
unread_rows.py: rows of a batch that its draft head has not read
"""
