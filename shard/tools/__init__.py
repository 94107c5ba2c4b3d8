"""What the command line starts as processes of its own; no request passes through here.

bare_engine.py: an engine over a model without text
"""
