"""Stored responses: conversations that clients asked this node to keep, in SQLite.

database.py: the file: opened, checked, set aside where it is damaged; its own thread
retention.py: which responses are deleted to keep to the limits
store.py: responses by id: written, read, continued, deleted
tables.py: the tables, and the form of what they hold
"""
