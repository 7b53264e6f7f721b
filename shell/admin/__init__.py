"""The admin port, HTTP only: metrics, a page, probes, status as JSON. For operators, not for clients."""
