"""What several dialects share: messages, tools, sampling, profiles, and the way to an answer.

answering.py: one request in any dialect to its HTTP answer
chat_message.py: a message of a chat request, OpenAI's or Ollama's
choices.py: the choices of one request: a request for each, one stream and one body
choices_schema.py: the number of choices that a request wants
history.py: the past of a conversation: read as far as it can be, repaired, named where dropped
image_parts.py: images as clients send them
message_parts.py: the parts of a message in every dialect that has parts
profile_file.py: a person's names for models with settings of their own
profiled_request.py: requests to those names
sampling_schema.py: the sampling fields of OpenAI's dialect
structured_schema.py: the form that a request wants its answer in
thinking_schema.py: how much a model should think, in the fields of each dialect
tool_choice.py: the tools that a model may or must call
tool_schema.py: tools and the options of a chat template, as a request declares them
unreadable_parts.py: sound, films and files in a message
"""
