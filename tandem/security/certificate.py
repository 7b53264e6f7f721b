"""What is asked of a certificate in PEM: when it ends, and whether gRPC speaks its key. Checks nothing else: TLS does.

The client may be installed without `cryptography`, so that is imported only where a certificate is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.x509 import Certificate


def not_after_s(chain: bytes) -> float | None:
    """Unix time at which the first certificate of a PEM chain ends; None if it holds none that can be read."""
    certificate = _first(chain)
    return None if certificate is None else certificate.not_valid_after_utc.timestamp()


def grpc_speaks_key(chain: bytes) -> bool:
    """Whether the key of the chain's first certificate is RSA, P-256 or P-384; true if it cannot be read here.

    Both OpenSSL and gRPC's BoringSSL speak these: with any other key no gRPC caller would ever get through.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric import ec, rsa
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    except ImportError:
        return True
    certificate = _first(chain)
    if certificate is None:
        return True
    try:
        key = certificate.public_key()
    except (UnsupportedAlgorithm, ValueError):
        return False
    if isinstance(key, ec.EllipticCurvePublicKey):
        if not isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1):
            return False
    elif not isinstance(key, rsa.RSAPublicKey):
        return False
    # As usually written: neither for RSA-PSS only, nor with its curve spelt out, which are read as the same key.
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) in certificate.tbs_certificate_bytes


def _first(chain: bytes) -> Certificate | None:
    from cryptography.x509 import load_pem_x509_certificate

    try:
        return load_pem_x509_certificate(chain)
    except ValueError:
        return None
