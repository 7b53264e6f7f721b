"""Who may speak to whom: TLS, mutual TLS, bearer tokens."""
