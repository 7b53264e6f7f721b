"""The face of vLLM's gRPC engine: `vllm.grpc.engine.VllmEngine` over the router's entrance."""
