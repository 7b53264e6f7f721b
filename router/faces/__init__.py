"""Faces of the router: each translates one protocol to and from the entrance, and does nothing else."""
