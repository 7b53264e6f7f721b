"""Parts of a certificate, found in its PEM. Checks nothing: TLS itself does.

The standard library tells these of a peer's certificate only, not of one's own. X.509 (RFC 5280, section 4.1)
in DER is nested (tag, length, content); a part is found by skipping what stands before it:

    Certificate { TBSCertificate { [0] version?, serial, signature, issuer, Validity { notBefore, notAfter },
                                   subject, SubjectPublicKeyInfo { AlgorithmIdentifier, key } …
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass

_PEM_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION = 0xA0


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is asked of one."""

    not_after_tag: int
    not_after: bytes
    """The end of its validity, as written."""
    key_algorithm: bytes
    """AlgorithmIdentifier of its key, whole: for elliptic curves, with the curve."""


def first_certificate(chain: bytes) -> Certificate | None:
    """The first one of a PEM chain, its holder's own; None if there is none that can be read."""
    block = _PEM_BLOCK.search(chain)
    if block is None:
        return None
    try:
        return _parse(ssl.PEM_cert_to_DER_cert(block.group().decode("ascii")))
    except (ValueError, IndexError):
        return None


def _parse(der: bytes) -> Certificate:
    _, at, _ = _element(der, 0)  # into Certificate
    _, at, _ = _element(der, at)  # into TBSCertificate
    tag, _, end = _element(der, at)
    if tag == _VERSION:
        at = end
    for _ in ("serial", "signature", "issuer"):
        _, _, at = _element(der, at)
    _, at, validity_end = _element(der, at)  # into Validity
    _, _, at = _element(der, at)  # past notBefore
    not_after_tag, begin, end = _element(der, at)
    _, _, at = _element(der, validity_end)  # past subject
    _, at, _ = _element(der, at)  # into SubjectPublicKeyInfo
    _, _, algorithm_end = _element(der, at)
    return Certificate(not_after_tag, der[begin:end], der[at:algorithm_end])


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """(tag, begin of the content, its end) of the element at `at`."""
    tag, length, begin = der[at], der[at + 1], at + 2
    if length & 0x80:
        num_bytes = length & 0x7F
        length = int.from_bytes(der[begin : begin + num_bytes], "big")
        begin += num_bytes
    if begin + length > len(der):
        raise ValueError("cut short")
    return tag, begin, begin + length
