"""Chat templates, tokenizers and detokenizers, and the helper process that runs them.

answer_format.py: how a checkpoint marks reasoning and calls of tools
argument_grammar.py: the grammar of the arguments of a tagged call
argument_values.py: what a model's text means under a tool's schema
bare_mlx_lm.py: mlx-lm's modules without its `__init__`
bare_transformers.py: the same of transformers
call_grammar.py: the grammar of a call that a request insists on
call_scanners.py: arguments of a call out of its text as it grows
call_stream.py: what is certain of a call that a model is writing
channels.py: an answer's text told apart: content, reasoning, calls
codec.py: tokenizer and detokenizer
control_tokens.py: keeps messages from spelling the tokens that structure a chat
grammar.py: what an answer may be, token by token
grammars.py: grammars compiled within limits
helper.py: the process that renders and tokenises, with limits on time and memory
helper_process.py: one helper process: started, asked, ended at a limit
helper_queue.py: requests to a helper in turn, and its replacement when it ends
lark.py: pieces of grammars: fixed text, control tokens, JSON documents
messages.py: a chat's messages, and their size
plain_calls.py: calls as plain JSON, for models whose own way to call is not known
prompt_encoder.py: prompts and grammars to the helpers for short and long requests
raw_strings.py: strings of a schema as expressions of their raw text
schemas.py: JSON schemas of arguments: references, and the kinds that they allow
stop_strings.py: stop strings in an answer's content
template.py: chat templates, their options, and where they let a system message stand
thinking.py: what a chat template takes of the requests about thinking
token_bytes.py: the bytes of one token
tokenizer_sizes.py: files that would be read for ever, refused
tool_calls.py: calls of tools out of a model's text
"""
