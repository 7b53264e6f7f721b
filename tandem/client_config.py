"""How a client reaches a router: address, deadline, security."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.option_values import host_port, seconds
from tandem.options import Section, grouped, option
from tandem.security.options import ClientSecurityConfig

DEFAULT_ADDRESS = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """What the commands that call a server take."""

    target: str = option(Section.CALL, "target", DEFAULT_ADDRESS, "address of a router", host_port())
    timeout_s: float = option(Section.CALL, "timeout-seconds", 300.0, "deadline of one call", seconds(0.001))
    security: ClientSecurityConfig = grouped(ClientSecurityConfig)
