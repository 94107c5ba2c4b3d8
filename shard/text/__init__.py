"""Chat templates, tokenizers and detokenizers, and the helper process that runs them.

bare_mlx_lm.py: mlx-lm's modules without its `__init__`
codec.py: chat template, tokenizer, detokenizer, stop strings
helper.py: the process that renders and tokenises, with limits on time and memory
messages.py: a chat's messages, and their size
prompt_encoder.py: sends prompts to helpers, and replaces helpers that hit a limit
token_bytes.py: the bytes of one token
"""
