"""NKEYs: the Ed25519 keys of NATS clients. A user has the public key, `U…`; the client signs the nonce of INFO.

base32( prefix byte | 32 bytes of the key | CRC-16/XMODEM of both, little-endian ), without padding
"""

from __future__ import annotations

import base64
import binascii
import secrets
from typing import Final

_USER_PREFIX: Final = 20 << 3  # U


def nonce() -> str:
    """Return a nonce as nats-server makes them: 11 random bytes as text."""
    return base64.urlsafe_b64encode(secrets.token_bytes(11)).rstrip(b"=").decode()


def read_public_key(text: str) -> bytes:
    """Return the Ed25519 key of a user's public NKEY. Raise ValueError."""
    if text.startswith("S"):
        raise ValueError("a seed, which must stay private: give the public key, which begins with U")
    try:
        data = base64.b32decode(text + "=" * (-len(text) % 8))
    except ValueError:
        data = b""
    if len(data) != 35 or int.from_bytes(data[33:], "little") != binascii.crc_hqx(data[:33], 0):
        raise ValueError("not an NKEY: it has 56 characters in base32, with a checksum")
    if data[0] != _USER_PREFIX:
        raise ValueError("not the public NKEY of a user: that begins with U")
    return data[1:33]


def is_signed(public_key: bytes, nonce: str, signature: object) -> bool:
    """Return whether a client has signed this nonce. The signature is base64, as clients write it."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if not isinstance(signature, str) or len(signature) > 200:
        return False
    try:
        text = signature.rstrip("=").replace("+", "-").replace("/", "_").encode()
        data = base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4))
        Ed25519PublicKey.from_public_bytes(public_key).verify(data, nonce.encode())
    except (ValueError, InvalidSignature):
        return False
    return True
