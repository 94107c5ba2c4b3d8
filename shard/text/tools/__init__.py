"""Tool calls and reasoning in an answer's text, as the publishers' formats mark them.

answer_format.py: how a checkpoint marks reasoning and tool calls
argument_values.py: the values of arguments under a tool's schema
call_formats.py: the call formats that are read, and the marks that begin calls
call_scanners.py: finds the calls in a text as it grows, and where they end
call_stream.py: streams the arguments of a call while a model writes it
channels.py: splits an answer's text into content, reasoning and calls
object_calls.py: scans calls whose arguments are the members of an object
object_formats.py: how formats spell calls with objects
schemas.py: JSON schemas of arguments: references, and the kinds that they allow
tagged_calls.py: scans calls whose arguments stand between tags
tool_calls.py: parses tool calls in a model's text
"""
