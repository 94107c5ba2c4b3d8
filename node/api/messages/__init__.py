"""Anthropic's Messages.

messages_api.py: Anthropic's Messages and count_tokens
messages_schema.py: their fields
"""
