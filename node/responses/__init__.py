"""Responses that can be continued: on the disk where requests ask for it, else in memory.

database.py: SQLite in memory or in a file, which is set aside where it is damaged; its own thread
retention.py: which responses are deleted to keep to the limits
store.py: responses by id: written, read, continued, deleted
tables.py: the tables, and the form of what they hold
"""
