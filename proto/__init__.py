"""The messages between processes, and bounds on their numbers.

bounds.py: bounds on every number that another process may send
checked_calls.py: what gRPC servers check before a method runs, such as bounds
fields.py: fields of messages, copied by their names
framing.py: messages after their length, on sockets and join ports
generate.py: writes the generated code from peer.proto
grpc_options.py: options of every gRPC channel and server
uncut_reads.py: reads of gRPC streams that are not cancelled, though whoever waits for them may be
"""
