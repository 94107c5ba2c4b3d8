"""HTTP: the server, its document, and what an entry node adds to the head's answers.

forward.py: sends requests that belong to the head there
openapi.py: the document of the routes and their bodies
server.py: the HTTP server
"""
