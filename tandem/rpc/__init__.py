"""How a process calls another process by gRPC: channels, TLS, received errors."""

import os

# gRPC reads the variable once, when it is imported: its informational lines stay off stderr unless it is set.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
