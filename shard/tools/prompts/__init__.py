"""Prompts for measurements; free of MLX.

prompts.py: prompts from a file, and the bundled ones
"""
