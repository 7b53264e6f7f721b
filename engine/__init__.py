"""Block pool, sequences, steps and sampling: what both workers are made of. Knows no gRPC and no peers."""
