"""What clients and Prometheus get of pods at one address: `python -m tests.deploy.pod_client ADDRESS TLS TOKENS`.

A program of its own, since it runs in the pods' network. TLS and TOKENS are the folders of the Secrets. Prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from shell.config import ClientSecurityConfig
from tandem.client import Client
from tests.deploy.https import ask

PROMPT, MAX_TOKENS = "Once upon a time", 16
PATIENCE_S = 120.0


def main(address: str, tls: Path, tokens: Path) -> dict[str, Any]:
    """Asks over gRPC and over HTTP for the same tokens, then for all that there is to scrape, and scrapes it."""
    token_file = tokens / "tokens"
    (token,) = token_file.read_text().split()
    authority = tls / "ca.crt"
    security = ClientSecurityConfig(tls_ca=str(authority), tls_server_name="tandem", token_file=str(token_file))
    with Client(f"{address}:50051", security=security) as client:
        client.wait_ready(timeout_s=PATIENCE_S)
        over_grpc = client.complete(PROMPT, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    more = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": MAX_TOKENS, **more}
    (choice,) = json.loads(ask(f"{address}:8080", "/v1/completions", authority, token, body))["choices"]
    places = [
        place for each in json.loads(ask(f"{address}:9090", "/targets", authority, token)) for place in each["targets"]
    ]
    return {
        "over_grpc": list(over_grpc.choices[0].token_ids),
        "over_http": choice["token_ids"],
        "scraped": {place: ask(place, "/metrics", authority, token).decode() for place in places},
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
