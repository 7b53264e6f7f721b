"""What every gRPC process shares: server shell, channels, health, table of statuses."""

from shell.config import quiet_grpc

quiet_grpc()  # here, since gRPC reads its environment only when it is imported
