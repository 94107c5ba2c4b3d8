"""Chat templates, tokenizers and detokenizers, and the helper process that runs them.

codec.py: chat template, tokenizer, detokenizer, stop strings
helper.py: the process that renders and tokenises, with limits on time and memory
messages.py: a chat's messages, and their size
prompt_encoder.py: sends prompts to helpers, and replaces helpers that hit a limit
token_bytes.py: the bytes of one token
"""
