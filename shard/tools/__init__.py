"""The processes that the command line starts; no request passes through here.

bare_engine.py: an engine over a model without text
"""
