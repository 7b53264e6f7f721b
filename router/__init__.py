"""The process that clients talk to: admits, places, and owns every request. Never reaches torch."""

import tandem.rpc  # noqa: F401 - before gRPC is imported
