"""Tandem against transformers and vLLM in one run: `python -m bench.peers`."""
