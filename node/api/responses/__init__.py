"""OpenAI's Responses, which a next request may continue.

response_memory.py: the latest responses by id
response_renderer.py: the items, events and states of a response
response_tools.py: the tools of a request of Responses, in namespaces and found by a search
responses_api.py: OpenAI's Responses, and the conversations that they continue
responses_schema.py: their fields
"""
