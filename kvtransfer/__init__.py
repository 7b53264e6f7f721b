"""The KV hand-off between two pools: protocol, tickets, transports. Knows blocks, never models or requests."""
