"""Grammars that hold an answer to a form, compiled within limits.

call_grammar.py: the grammar of a required tool call
enforceable.py: JSON schemas without what grammars cannot take
grammar.py: masks of the tokens that a grammar allows in an answer
grammars.py: compiles grammars within limits
"""
