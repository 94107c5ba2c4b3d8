"""OpenAI's Responses, and those that are stored or answered in the background.

response_renderer.py: the items, events and states of a response
response_run.py: an answer that is stored, runs without its client, and has any number of readers
response_runs.py: all of these, and their readers
response_tools.py: the tools of a request of Responses, in namespaces and found by a search
responses_api.py: OpenAI's Responses, their input as it is stored
responses_schema.py: their fields
stored_responses_api.py: stored responses by id, and pages of their input
"""
