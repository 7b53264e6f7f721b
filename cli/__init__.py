"""The tandem command: one file per subcommand."""

from cli.first_process import heed_sigterm
from tandem.config import quiet_grpc

heed_sigterm()  # before the commands' imports, which take a second
quiet_grpc()  # before gRPC is imported, which reads the variable once
