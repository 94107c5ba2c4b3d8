"""The processes that the command line starts; no request passes through here.

bare_engine.py: an engine over a model without text
child.py: a command's child process: its request, its errors, its end
"""
