"""The messages between processes, and bounds on their numbers.

bound_server.py: gRPC servers that refuse numbers out of bounds
bounds.py: bounds on every number that another process may send
fields.py: fields of messages, copied by their names
framing.py: messages behind their length, on sockets and join ports
generate.py: writes the generated code from peer.proto
grpc_options.py: options of every gRPC channel and server
"""
