"""The face of KServe v2 / Triton: `inference.GRPCInferenceService` over the router's entrance."""
