"""Chat templates, tokenizers and detokenizers, and the helper process that runs them.

answer_format.py: how a checkpoint marks reasoning and calls of tools
bare_mlx_lm.py: mlx-lm's modules without its `__init__`
bare_transformers.py: the same of transformers
call_grammar.py: the grammar of a call that a request insists on
channels.py: an answer's text told apart: content, reasoning, calls
codec.py: tokenizer, detokenizer, stop strings
control_tokens.py: keeps messages from spelling the tokens that structure a chat
grammar.py: what an answer may be, token by token
grammars.py: grammars compiled within limits
helper.py: the process that renders and tokenises, with limits on time and memory
messages.py: a chat's messages, and their size
prompt_encoder.py: sends prompts to helpers, and replaces helpers that hit a limit
template.py: chat templates, their options, and where they let a system message stand
token_bytes.py: the bytes of one token
tokenizer_sizes.py: files that would be read for ever, refused
tool_calls.py: calls of tools out of a model's text
"""
