"""Every kernel against its peers and the machine's ceilings: `python -m bench.kernels`."""
