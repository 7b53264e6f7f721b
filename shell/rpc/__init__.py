"""What every gRPC server process shares: server, bounds, health, table of statuses."""

import tandem.rpc  # noqa: F401 - before gRPC is imported
