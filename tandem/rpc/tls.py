"""TLS as gRPC takes it: credentials from a process's files, and what the text of a failed handshake means."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from tandem.security.tls import ClientTls, ServerPem, ServerTls

TLS_FAILURES = (
    ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "the server's certificate has expired"),
    ("CERTIFICATE_VERIFY_FAILED", "no authority that this side trusts (--tls-ca) vouches for the server's certificate"),
    ("Hostname Verification Check failed", "the server's certificate bears another name; see --tls-server-name"),
    (
        "WRONG_VERSION_NUMBER",
        "the server does not speak TLS; leave --tls-ca out, or start the server with --tls-cert and --tls-key",
    ),
    ("handshake failed", "TLS could not be set up"),
)
"""Text in gRPC's details, and what it means for the caller; the first that fits counts."""


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """For a port: every new connection uses the files as they are then; those that stand go on."""
    return grpc.dynamic_ssl_server_credentials(
        _configuration(tls.pem()),
        _fetcher(tls),  # type: ignore[arg-type]  # its stub does not know that None means "as before"
        require_client_authentication=tls.requires_client_certificate,
    )


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Returns the credentials of a channel, from the present files."""
    pem = tls.pem()
    return grpc.ssl_channel_credentials(pem.authorities, pem.key, pem.chain)


def tls_failure(details: str) -> str | None:
    """Why TLS could not be set up, from the details of an UNAVAILABLE status; None if that was not the reason."""
    return next((meaning for text, meaning in TLS_FAILURES if text in details), None)


def _fetcher(tls: ServerTls) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """Called by gRPC at each handshake, on a thread of its own; None = as before."""
    last = tls.pem()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last
        pem = tls.pem()
        if pem is last:
            return None
        last = pem
        return _configuration(pem)

    return fetch


def _configuration(pem: ServerPem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.chain)], root_certificates=pem.client_authorities)
