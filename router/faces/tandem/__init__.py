"""Tandem's own services: InferenceService and ClusterService."""
