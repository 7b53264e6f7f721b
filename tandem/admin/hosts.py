"""Which `Host` headers a port on loopback answers to: only its own names.

Else a page anywhere could let its own name point at 127.0.0.1 and read this port through a visitor's
browser (DNS rebinding). A port that is open to others is reached by names that it cannot know; there, the
token is what keeps strangers out.
"""

from __future__ import annotations

import ipaddress

from tandem.security.exposure import is_loopback


class Hosts:
    """Judges `Host` headers for a port that listens on HOST:PORT `listen`."""

    def __init__(self, listen: str) -> None:
        self._any = not is_loopback(listen)
        self._own = {"localhost", _name_of(listen)}

    def allows(self, header: str | None) -> bool:
        """Whether this port may be called so; whatever its number, which tunnels change."""
        if self._any:
            return True
        name = _name_of(header or "")
        return name in self._own or _is_loopback_literal(name)


def _name_of(address: str) -> str:
    """The host of `HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`."""
    if address.startswith("["):
        return address[1:].partition("]")[0].lower()
    return address.partition(":")[0].lower()


def _is_loopback_literal(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
