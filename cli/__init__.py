"""The tandem command: one file per subcommand."""

from cli.first_process import heed_sigterm
from tandem.config import quiet_grpc

heed_sigterm()  # here: the commands' imports take a second
quiet_grpc()  # here: gRPC looks when it is imported, and no later
