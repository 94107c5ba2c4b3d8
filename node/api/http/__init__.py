"""Bytes of HTTP before and after a handler: limits, checks, bodies, streams, errors.

bodies.py: request bodies: strict and tolerant schemas, with the nearest field's name in the error
connection_limits.py: limits on connections, headers and the time that a request may take to
    arrive
content_encoding.py: bodies that a client has compressed
dialects.py: what a dialect is: a body, its parser, a renderer, errors; and which one a path has
drain.py: a node that stops: it refuses new work and waits for requests in progress
errors.py: the error tree as HTTP answers
guard.py: Host, Origin, key, body size: the checks before a handler runs
long_bodies.py: answers of any length, encoded piece by piece
origins.py: pages of other origins that may use the node
routes.py: routes that carry their body, query and media type
session_api.py: the login link of the dashboard
sse.py: server-sent events
static_files.py: the dashboard's files, compressed and with tags
strict_json.py: JSON without duplicate names, NaN or lone surrogates
"""
