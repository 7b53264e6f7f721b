"""What every server process is wrapped in: options, config, RPC, security, telemetry, clock."""
