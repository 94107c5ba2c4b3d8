"""OpenAI's chat completions and completions.

completion_logprobs.py: log-probabilities in the form of completions
completions_api.py: completions, tokenize and detokenize: text and ids without a template
completions_schema.py: their fields
openai_api.py: chat completions, OpenAI's way
openai_schema.py: the fields of a chat request
"""
