"""TLS, mutual TLS and bearer tokens of every port and every call."""
