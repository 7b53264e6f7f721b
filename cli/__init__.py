"""The tandem command: a file for each subcommand."""

import os
import signal

import tandem.rpc  # noqa: F401 - before gRPC is imported

if os.getpid() == 1:
    # The kernel ignores SIGTERM for a container's first process unless it has a handler. Until `rpc.process` installs
    # a server's, the process holds nothing and may end at once; the commands' imports alone take a second.
    signal.signal(signal.SIGTERM, lambda signum, frame: os._exit(128 + signum))
