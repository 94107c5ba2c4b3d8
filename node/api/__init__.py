"""HTTP: the chat API, the operations API, events, and what is refused before a handler runs.

body_schema.py: checks of a JSON body, with the nearest field's name in the error
connection_limits.py: limits on connections, headers and the time that a request may take to
    arrive
drain.py: a node that stops: nothing new, and time for what runs
errors.py: the error tree as HTTP answers
events_api.py: the event log as a stream
forward.py: sends requests that belong to the head there
guard.py: Host, Origin, key, body size: what is refused before a handler runs
join_api.py: waiting nodes, approvals and key changes over HTTP
openai_api.py: chat completions, OpenAI's way
openai_schema.py: the fields of a chat request
operations_api.py: placements, models, cluster, metrics, health
origins.py: pages of other origins that may use the node
plan_request.py: the options of a placement request
profile_api.py: measured layer times and links
server.py: the HTTP server
session_api.py: the login link of the dashboard
sse.py: server-sent events
strict_json.py: JSON without duplicate names, NaN or lone surrogates
tool_schema.py: tools and the options of a chat template, as a request declares them
"""
