"""URLs in the settings may have a password, which is shown nowhere."""

from __future__ import annotations

import pytest

from tests.support import forks
from tests.support.server import clean_environment


@pytest.mark.parametrize("as_json", [False, True])
def test_settings_show_no_password_of_a_url(as_json: bool) -> None:
    environment = clean_environment() | {"PENSTOCK_PIPE_PARENT": "http://u:s3cr3tpw@h:1"}
    done = forks.run(["config", *(["--json"] if as_json else [])], environment=environment)
    assert done.returncode == 0
    assert b"s3cr3tpw" not in done.stdout + done.stderr
    assert b"http://***@h:1" in done.stdout


@pytest.mark.parametrize("key", ["REGISTRY_URL", "PIPE_PARENTS"])
def test_errors_show_no_password_of_a_url(key: str) -> None:
    long = "x" * 120
    for secret in ("s3cr3tpw", "s3cr3t@pw", f"s3cr3t{long}"):
        environment = clean_environment() | {f"PENSTOCK_{key}": f"http://u:{secret}@h:1"}
        done = forks.run(["config"], environment=environment)
        assert done.returncode == 1
        assert b"s3cr3t" not in done.stderr
        assert b"is 'http://***@h:1': it must be" in done.stderr
