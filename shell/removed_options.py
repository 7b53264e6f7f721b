"""Options that were removed, and what to do instead: command line and environment refuse each with that line."""

from __future__ import annotations

from collections.abc import Mapping

REMOVED: Mapping[str, str] = {
    "core-loan": "tandem serve lends cores",
    "decode-devices": "give --device a list, prefill workers first",
    "disk-cache-memory": "say --disk-cache DIR=SIZE",
    "http-gateway": "the router itself serves --http; docs/clients.md says how to put a gateway in front",
    "kv-events-format": "KV events are maps",
    "kv-events-replay": "give --kv-events two addresses, the second for replays",
    "lease-seconds": "a silent peer is lost after 5 s",
    "lend-cores": "say --threads N: such workers lend no cores",
    "max-beam-width": "a beam search has 16 beams at most",
    "max-cache-salt-bytes": "a cache_salt has 256 bytes at most",
    "max-chat-messages": "a chat has 4096 messages at most; --max-prompt-tokens bounds their text",
    "max-logit-bias": "logit_bias has 1024 entries at most",
    "max-n": "a request has 16 choices at most",
    "max-prompt-bytes": "say --max-prompt-tokens: a text may have four bytes for each",
    "max-receive-bytes": "messages have room for --max-prompt-tokens",
    "max-request-id-bytes": "a request_id has 256 bytes at most",
    "max-restart-delay-seconds": "waits before a restart end at 30 s",
    "max-retries": "a request is moved twice in a row without progress, and beyond that to workers not tried yet",
    "max-stop-bytes": "a stop string has 1024 bytes at most",
    "max-stop-strings": "a request has 16 stop strings at most",
    "max-stop-token-ids": "a request has 256 stop token ids at most",
    "max-unread-request-bytes": "say --max-unread-bytes: a request may have a quarter of it",
    "max-unread-seconds": "a request whose answer is not read for 60 s is ended",
    "overlap": "a chunk's blocks are sent while the next one computes",
    "prefill-devices": "give --device a list, prefill workers first",
    "process": "say tandem serve --router-processes N",
    "processes": "say tandem serve --router-processes N",
    "roles": "say --workers N for elastic workers, or --prefill N --decode N for static roles",
}
"""Advice by name, without dashes; `.ci/checks/options_page.py` shows the table in docs/options.md."""
