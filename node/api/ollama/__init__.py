"""Ollama's API, and embeddings, as OpenAI and Ollama have them.

embeddings_api.py: embeddings, as OpenAI and Ollama have them
ollama_api.py: Ollama's API
ollama_schema.py: its fields
"""
