"""Chat templates, tokenizers and detokenizers, and the helper process that runs them.

bare_packages.py: imports modules of mlx-lm and transformers without their `__init__`
codec.py: tokenizer and detokenizer
control_tokens.py: keeps messages from spelling the tokens that structure a chat
helper.py: the process that renders and tokenises, with limits on time and memory
helper_process.py: the parent's side of one helper process and its limits
image_rows.py: the rows of images in a prompt, and their ids
infill.py: prompts of the text in front of a gap and the text after it
messages.py: a chat's messages, and their size
orphans.py: the end of a stopped process whose parent was killed
pictures.py: decodes image files within limits and cuts them into patches
plain_calls.py: tools and calls for models and templates without a form of their own for them
prompt_encoder.py: sends prompts and grammars to the helpers for short and long requests, whose
  processes it replaces
rewritings.py: joins, splits and moves turns of a chat, as far as its template needs that
stop_strings.py: stop strings in an answer's content
template.py: chat templates and their options
thinking.py: a chat template's variables for reasoning
token_bytes.py: the bytes of one token
tokenizer_folder.py: a tokenizer's files as this engine reads them, and their limits
"""
