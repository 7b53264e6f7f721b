"""The process that clients talk to: admits, places, and owns every request. Never reaches torch."""

from shell.config import quiet_grpc

quiet_grpc()  # here: gRPC looks when it is imported, and no later
