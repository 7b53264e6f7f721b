"""Stubs of protocols that others own and that Tandem speaks too: KServe v2 / Triton, and vLLM's gRPC engine."""
