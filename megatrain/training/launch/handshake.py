"""Handshake between a rank and the watch server: each proves that it has the key of the run, which is never sent.

    server ─> {"nonce"}       rank ─> {"nonce", "location", "proof"}       server ─> {"location", "proof"} or {"refused"}

A proof is an HMAC-SHA256 of both nonces, the sender's role and its location.
"""

from __future__ import annotations

import hmac
import json
import secrets
from typing import Any, Final, Literal

from megatrain.checkpoint.untrusted_json import Check, integer, parse_json, record, text

MAX_HANDSHAKE_BYTES: Final = 4096
MAX_MESSAGE_BYTES: Final = 1 << 16
LOCATION: Final[dict[str, Check]] = {
    "rank": integer(),
    "world_size": integer(1),
    "local_rank": integer(),
    "host": text(max_characters=300),
    "pid": integer(),
}
_PROOF: Final = text(max_characters=200)
_MESSAGES: Final[dict[str, Check]] = {
    "server nonce": record({"nonce": _PROOF}),
    "rank": record({"nonce": _PROOF, "location": record(LOCATION), "proof": _PROOF}),
    "server": record({"location": record(LOCATION), "proof": _PROOF}),
}
Role = Literal["rank", "server"]


def new_nonce() -> str:
    return secrets.token_hex(16)


def proof_of(key: bytes, role: Role, nonces: tuple[str, str], location: dict[str, Any]) -> str:
    """Return the proof of a rank or the server. `nonces`: the server's and the rank's."""
    content = json.dumps([role, *nonces, sorted(location.items())]).encode()
    return hmac.digest(key, content, "sha256").hex()


def is_proof(proof: str, key: bytes, role: Role, nonces: tuple[str, str], location: dict[str, Any]) -> bool:
    """Return whether the sender of a proof has the key."""
    return hmac.compare_digest(proof.encode(), proof_of(key, role, nonces, location).encode())


def read_handshake(line: bytes, kind: Literal["server nonce", "rank", "server"]) -> dict[str, Any]:
    """Parse a message of the handshake. Raises ValueError or RecursionError."""
    message = parse_json(line, max_bytes=MAX_HANDSHAKE_BYTES)
    _MESSAGES[kind](message, "the message")
    location = message.get("location")
    if location is not None:
        message["location"] = {name: location[name] for name in LOCATION}
    assert isinstance(message, dict)
    return message
