"""What every gRPC process shares: server shell, channels, status table, worker stream."""

from tandem.config import quiet_grpc

quiet_grpc()  # here: gRPC looks when it is imported, and no later
