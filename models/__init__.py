"""Decoder families, written once over kernels, and strict checkpoint loading. Importing it needs no torch."""
