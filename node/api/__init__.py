"""HTTP: the server, and what an entry node adds to the head's answers.

forward.py: sends requests that belong to the head there
server.py: the HTTP server
"""
