"""Chat templates, tokenizers and detokenizers, and the helper process that runs them.

answer_format.py: how a checkpoint marks reasoning and tool calls
argument_grammar.py: the grammar of the arguments of a tagged call
argument_values.py: the values of arguments under a tool's schema
bare_packages.py: imports modules of mlx-lm and transformers without their `__init__`
call_formats.py: the call formats that are read, and the marks that begin calls
call_grammar.py: the grammar of a required tool call
call_scanners.py: finds the calls in a text as it grows, and where they end
call_stream.py: streams the arguments of a call while a model writes it
channels.py: splits an answer's text into content, reasoning and calls
codec.py: tokenizer and detokenizer
control_tokens.py: keeps messages from spelling the tokens that structure a chat
enforceable.py: JSON schemas without what grammars cannot take
grammar.py: masks of the tokens that a grammar allows in an answer
grammars.py: compiles grammars within limits
helper.py: the process that renders and tokenises, with limits on time and memory
helper_process.py: the parent's side of one helper process and its limits
helper_queue.py: queues requests to a helper and replaces a helper that ended
image_rows.py: the rows of images in a prompt, and their ids
infill.py: prompts of the text in front of a gap and the text after it
jpeg_scans.py: refuses JPEGs that take long to decode
lark.py: pieces of grammars: fixed text, control tokens, JSON documents
look_ahead.py: patterns that look ahead, as several that do not
messages.py: a chat's messages, and their size
number_bound.py: bounds the digits of JSON numbers
object_calls.py: scans calls whose arguments are the members of an object
object_formats.py: how formats spell calls with objects
orphans.py: the end of a stopped process whose parent was killed
outlines.py: tools for templates that cannot read their schemas
pictures.py: decodes image files within limits and cuts them into patches
plain_calls.py: tool calls as plain JSON, for models without a known call format
prompt_encoder.py: sends prompts and grammars to the helpers for short and long requests
raw_strings.py: regular expressions for the raw text of a schema's strings
rewritings.py: finds the rewriting of a chat that a template takes without losing a part
schemas.py: JSON schemas of arguments: references, and the kinds that they allow
stop_strings.py: stop strings in an answer's content
tagged_calls.py: scans calls whose arguments stand between tags
template.py: chat templates and their options
thinking.py: a chat template's variables for reasoning
token_bytes.py: the bytes of one token
tokenizer_folder.py: a tokenizer's files as this engine reads them, for the libraries
tokenizer_sizes.py: refuses tokenizer files that would take minutes to read
tool_calls.py: parses tool calls in a model's text
turns.py: joins, splits and moves turns of a chat
"""
