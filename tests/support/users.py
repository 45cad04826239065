"""Users for tests: a file of them, with cheap hashes, and NKEYs."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from argon2 import PasswordHasher
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

PASSWORD = "correct-horse"
# As secure as a test needs: 1 ms.
_HASHER = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)


def hashed(password: str = PASSWORD) -> str:
    return _HASHER.hash(password)


def write_users(path: Path, text: str) -> Path:
    """Write a file of users; {password} stands for the hash of PASSWORD."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o600)
    path.write_text(text.replace("{password}", hashed()))
    return path


class Nkey:
    """The key of a NATS user."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        public = self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        data = bytes([20 << 3]) + public
        data += binascii.crc_hqx(data, 0).to_bytes(2, "little")
        self.public = base64.b32encode(data).rstrip(b"=").decode()

    def sign(self, nonce: str) -> str:
        return base64.b64encode(self._key.sign(nonce.encode())).decode()
