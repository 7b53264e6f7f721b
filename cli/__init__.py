"""The tandem command: one file per subcommand."""

import os
import signal

from shell.config import quiet_grpc

if os.getpid() == 1:
    # The kernel ignores SIGTERM for a container's first process unless it has a handler. Until `rpc.process` installs
    # a server's, the process holds nothing and may end at once; the commands' imports alone take a second.
    signal.signal(signal.SIGTERM, lambda signum, frame: os._exit(128 + signum))
quiet_grpc()  # before gRPC is imported, which reads the variable once
