"""When a certificate ends, read from its PEM; for whoever watches."""

from __future__ import annotations

from datetime import UTC, datetime

from tandem.security.certificate import first_certificate

_UTC_TIME = 0x17


def not_after_s(chain: bytes) -> float | None:
    """Unix time at which the first certificate of a PEM chain ends; None if it holds none that can be read."""
    certificate = first_certificate(chain)
    if certificate is None:
        return None
    # Years have two digits until 2049, and four from 2050 on.
    pattern = "%y%m%d%H%M%SZ" if certificate.not_after_tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    try:
        moment = datetime.strptime(certificate.not_after.decode("ascii"), pattern)
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC).timestamp()
