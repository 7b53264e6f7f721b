"""When a certificate ends, read from its PEM; for whoever watches. Checks nothing: TLS itself does.

The standard library tells this of a peer's certificate only, not of one's own. X.509 (RFC 5280, section 4.1)
in DER is nested (tag, length, content); the end of validity is found by skipping what stands before it:

    Certificate { TBSCertificate { [0] version?, serial, signature, issuer, Validity { notBefore, notAfter } …
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime

_PEM_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION = 0xA0
_UTC_TIME = 0x17


def not_after_s(chain: bytes) -> float | None:
    """Unix time at which the first certificate of a PEM chain ends; None if it holds none that can be read."""
    block = _PEM_BLOCK.search(chain)
    if block is None:
        return None
    try:
        return _not_after_s(ssl.PEM_cert_to_DER_cert(block.group().decode("ascii")))
    except (ValueError, IndexError):
        return None


def _not_after_s(der: bytes) -> float:
    _, at, _ = _element(der, 0)  # into Certificate
    _, at, _ = _element(der, at)  # into TBSCertificate
    tag, _, end = _element(der, at)
    if tag == _VERSION:
        at = end
    for _ in ("serial", "signature", "issuer"):
        _, _, at = _element(der, at)
    _, at, _ = _element(der, at)  # into Validity
    _, _, at = _element(der, at)  # past notBefore
    tag, begin, end = _element(der, at)
    # Years have two digits until 2049, and four from 2050 on.
    text = der[begin:end].decode("ascii")
    moment = datetime.strptime(text, "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ")
    return moment.replace(tzinfo=UTC).timestamp()


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
