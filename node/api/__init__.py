"""HTTP: the chat API, the operations API, events, and the checks before a handler runs.

answering.py: one request in any dialect to its HTTP answer
bodies.py: request bodies: strict and tolerant schemas, with the nearest field's name in the error
chat_message.py: a message of a chat request, OpenAI's or Ollama's
choices.py: the choices of one request: a request for each, one stream and one body
choices_schema.py: the number of choices that a request wants
completion_logprobs.py: log-probabilities in the form of completions
completion_renderer.py: text completions and their chunks
completions_api.py: completions, tokenize and detokenize: text and ids without a template
completions_schema.py: their fields
connection_limits.py: limits on connections, headers and the time that a request may take to
    arrive
content_encoding.py: bodies that a client has compressed
dialects.py: what a dialect is: a body, its parser, a renderer, errors; and which one a path speaks
drain.py: a node that stops: it refuses new work and waits for requests in progress
embeddings_api.py: embeddings, as OpenAI and Ollama have them
errors.py: the error tree as HTTP answers
events_api.py: the event log as a stream
forward.py: sends requests that belong to the head there
frame_log.py: the events of one answer, which any number of readers follow
guard.py: Host, Origin, key, body size: the checks before a handler runs
history.py: the past of a conversation: read as far as it can be, repaired, named where dropped
image_parts.py: images as clients send them
join_api.py: waiting nodes, approvals and key changes over HTTP
keep_alive.py: how long a model stays loaded after a request
long_bodies.py: answers of any length, encoded piece by piece
message_parts.py: the parts of a message in every dialect that has parts
messages_api.py: Anthropic's Messages and count_tokens
messages_schema.py: their fields
model_entries.py: models in the shape of each API: OpenAI's and Anthropic's, and Ollama's
models_api.py: models on the hub, their downloads, and their deletion
ollama_api.py: Ollama's API
ollama_files.py: its pull, delete and copy
ollama_schema.py: its fields
openai_api.py: chat completions, OpenAI's way
openai_schema.py: the fields of a chat request
openapi.py: the document of the routes and their bodies
operations_api.py: placements, models, cluster, metrics, health
origins.py: pages of other origins that may use the node
plan_request.py: the options of a placement request
profile_file.py: a person's names for models with settings of their own
profile_lists.py: lists of models with those names among them
profiled_request.py: requests to those names
response_call.py: one call among the items of a response
response_items.py: pages of a stored response's input
response_renderer.py: the items, events and states of a response
response_run.py: an answer that is stored, and runs without its client
response_runs.py: all of these, and their readers
response_tools.py: the tools of a request of Responses, in namespaces and found by a search
responses_api.py: OpenAI's Responses
responses_schema.py: their fields
routes.py: routes that carry their body, query and media type
sampling_schema.py: the sampling fields of OpenAI's dialect
server.py: the HTTP server
session_api.py: the login link of the dashboard
sse.py: server-sent events
static_files.py: the dashboard's files, compressed and with tags
stored_responses_api.py: stored responses by id
strict_json.py: JSON without duplicate names, NaN or lone surrogates
structured_schema.py: the form that a request wants its answer in
thinking_schema.py: how much a model should think, in the fields of each dialect
tool_choice.py: the tools that a model may or must call
tool_schema.py: tools and the options of a chat template, as a request declares them
unreadable_parts.py: sound, films and files in a message
"""
