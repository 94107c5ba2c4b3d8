"""The operations API: placements, models, joining, events.

events_api.py: the event log as a stream
join_api.py: waiting nodes, approvals and key changes over HTTP
model_entries.py: models in the shape of each API: OpenAI's and Anthropic's, and Ollama's
models_api.py: models on the hub, their downloads, and their deletion
operations_api.py: placements, models, cluster, metrics, health
plan_request.py: the options of a placement request
"""
