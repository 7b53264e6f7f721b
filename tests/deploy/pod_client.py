"""What clients and Prometheus get of pods at one address: `python -m tests.deploy.pod_client ADDRESS TLS TOKENS`.

A program of its own, since it runs in the pods' network. TLS and TOKENS are the folders of the Secrets. Prints JSON.
"""

from __future__ import annotations

import json
import ssl
import sys
import urllib.request
from pathlib import Path
from typing import Any

from shell.config import ClientSecurityConfig
from tandem.client import Client

PROMPT, MAX_TOKENS = "Once upon a time", 16
PATIENCE_S = 120.0


def main(address: str, tls: Path, tokens: Path) -> dict[str, Any]:
    """Asks over gRPC and over HTTP for the same tokens, then for all that there is to scrape, and scrapes it."""
    token_file = tokens / "tokens"
    (token,) = token_file.read_text().split()
    context = ssl.create_default_context(cafile=tls / "ca.crt")
    context.check_hostname = False  # the certificate is for `tandem`, whatever the address

    def ask(place: str, body: object | None = None) -> bytes:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"https://{place}", data, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S, context=context) as response:
            return bytes(response.read())

    security = ClientSecurityConfig(tls_ca=str(tls / "ca.crt"), tls_server_name="tandem", token_file=str(token_file))
    with Client(f"{address}:50051", security=security) as client:
        client.wait_ready(timeout_s=PATIENCE_S)
        over_grpc = client.complete(PROMPT, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    more = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": MAX_TOKENS, **more}
    (choice,) = json.loads(ask(f"{address}:8080/v1/completions", body))["choices"]
    targets = json.loads(ask(f"{address}:9090/targets"))
    return {
        "over_grpc": list(over_grpc.choices[0].token_ids),
        "over_http": choice["token_ids"],
        "scraped": {each["targets"][0]: ask(f"{each['targets'][0]}/metrics").decode() for each in targets},
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
