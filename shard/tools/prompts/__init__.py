"""Prompts to measure with; free of MLX.

prompts.py: prompts from a file, and the bundled ones
"""
