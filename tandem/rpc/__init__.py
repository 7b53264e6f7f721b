"""What every gRPC process shares: server shell, channels, status table, worker stream."""
