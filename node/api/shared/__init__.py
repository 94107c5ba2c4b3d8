"""Parts of several dialects: messages, tools, sampling, profiles, and the way to an answer.

answering.py: one request in any dialect to its HTTP answer
chat_message.py: a message of a chat request, OpenAI's or Ollama's
choices.py: the choices of one request: a request for each, one stream and one body
history.py: the past of a conversation: read as far as it can be, repaired, named where dropped
inputs_schema.py: texts and token ids in place of messages
message_parts.py: the parts of a message in every dialect that has parts, images among them
profile_file.py: a person's names for models with settings of their own, and requests to them
sampling_schema.py: the fields of requests for answers, and the request that they make
thinking_schema.py: how much a model should think, in the fields of each dialect
tool_schema.py: tools as a request declares them, and those that a model may or must call
"""
