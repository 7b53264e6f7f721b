"""HTTP for callers: the server around the routes of a face, as `shell.rpc` is around gRPC services."""
