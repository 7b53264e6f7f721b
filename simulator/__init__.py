"""Tandem on a simulated clock: real placement, admission and workers' cores, around an engine that only takes time."""
