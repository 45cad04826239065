"""Logins that arrive together, and passwords that are no text."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.errors import Unauthorized
from penstock.security import passwords
from penstock.security.identity import Identity
from penstock.security.security import Login, Security, SecuritySettings
from penstock.testing import ManualClock

FAILURES_MAX = 3


@pytest.fixture
def security(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Security:
    path = tmp_path / "users.toml"
    path.write_text(f'[users.ann]\npassword = "{passwords.hash_password("right")}"\n')
    path.chmod(0o600)

    async def no_wait(_delay: float) -> None:
        pass

    monkeypatch.setattr("penstock.security.security.asyncio.sleep", no_wait)
    return Security(ManualClock(), SecuritySettings(users=path, failures_max=FAILURES_MAX))


async def _log_in(security: Security, password: str) -> Identity:
    found = security.login(Login(user="ann", password=password), address="10.0.0.1", door="text")
    return found if isinstance(found, Identity) else await found


def test_guesses_in_parallel_are_as_limited_as_single_ones(security: Security, monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[str] = []
    verify = passwords._verify

    def note(password_hash: str | None, password: str) -> bool:
        verified.append(password)
        return verify(password_hash, password)

    monkeypatch.setattr(passwords, "_verify", note)

    async def main() -> list[Identity | BaseException]:
        guesses = [*(f"wrong {number}" for number in range(59)), "right"]
        return await asyncio.gather(*(_log_in(security, guess) for guess in guesses), return_exceptions=True)

    answers = asyncio.run(main())
    assert all(isinstance(answer, Unauthorized) for answer in answers)
    assert FAILURES_MAX <= len(verified) < FAILURES_MAX + passwords.THREADS


def test_connections_that_log_in_together_are_all_let_in(security: Security) -> None:
    async def main() -> list[Identity]:
        return await asyncio.gather(*(_log_in(security, "right") for _ in range(20)))

    assert {identity.name for identity in asyncio.run(main())} == {"ann"}


def test_a_password_with_half_a_character_is_wrong(security: Security) -> None:
    with pytest.raises(Unauthorized, match="does not know this user"):
        asyncio.run(_log_in(security, "\ud800"))
