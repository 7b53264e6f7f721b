"""When certificates end, as an independent issuer made them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
import trustme

from tandem.security.certificate import not_after_s


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


def chain(authority: trustme.CA, not_after: datetime) -> bytes:
    """A leaf and its issuer, in PEM."""
    leaf = authority.issue_cert("localhost", not_after=not_after, key_type=trustme.KeyType.ECDSA)
    return b"".join(blob.bytes() for blob in leaf.cert_chain_pems) + authority.cert_pem.bytes()


@pytest.mark.parametrize("year", [2026, 2049, 2050, 2070])
def test_the_end_is_that_of_the_first_certificate_of_the_chain(authority: trustme.CA, year: int) -> None:
    moment = datetime(year, 12, 31, 12, 30, 59, tzinfo=UTC)
    assert not_after_s(chain(authority, moment)) == moment.timestamp()


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"no certificate",
        b"-----BEGIN CERTIFICATE-----\n????\n-----END CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    ],
)
def test_what_cannot_be_read_has_no_end(broken: bytes) -> None:
    assert not_after_s(broken) is None
