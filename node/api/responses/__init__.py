"""OpenAI's Responses, and those that are stored or answered in the background.

frame_log.py: the events of one answer, which any number of readers follow
response_call.py: one call among the items of a response
response_items.py: pages of a stored response's input
response_renderer.py: the items, events and states of a response
response_run.py: an answer that is stored, and runs without its client
response_runs.py: all of these, and their readers
response_tools.py: the tools of a request of Responses, in namespaces and found by a search
responses_api.py: OpenAI's Responses
responses_schema.py: their fields
stored_responses_api.py: stored responses by id
"""
