"""The tandem command: one file per subcommand."""

from tandem.config import quiet_grpc

quiet_grpc()  # here: gRPC looks when it is imported, and no later
