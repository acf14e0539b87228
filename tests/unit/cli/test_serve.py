from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest

from gradpost.settings import Role, settings_class
from ps_config.environment import PREFIX
from services.coordinator.settings import CoordinatorSettings
from services.runtime.settings import ServiceSettings

from ..protocol.test_certificates import Authority
from .conftest import RunCommand


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServiceSettings]:
    """The settings that the coordinator was run with; it ends at once, with exit code 5."""
    settings: list[ServiceSettings] = []

    def main(given: ServiceSettings) -> None:
        settings.append(given)
        raise SystemExit(5)

    monkeypatch.setattr(importlib.import_module("services.coordinator.process"), "main", main)
    return settings


def test_flag_over_environment_over_file_over_default(
    run_command: RunCommand, served: list[ServiceSettings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "gradpost.toml"
    file.write_text('num_trainers = 1\nnum_pservers = 1\nplacement = "hash"\nthreads = 3\n')
    monkeypatch.setenv("GRADPOST_SETTINGS_FILE", str(file))
    monkeypatch.setenv("GRADPOST_NUM_TRAINERS", "2")
    monkeypatch.setenv("GRADPOST_NUM_PSERVERS", "2")
    outcome = run_command("serve", "coordinator", "--num-trainers", "3")
    assert outcome.exit_code == 5, outcome.stderr
    expected = CoordinatorSettings(num_trainers=3, num_pservers=2, placement="hash")
    assert served == [expected]
    assert served[0].model_fields_set == expected.model_fields_set  # nothing was passed that was not given


@pytest.mark.parametrize(
    ("role", "of_no_use"), [("coordinator", {"coordinator", "listen_fd"}), ("pserver", {"lease_seconds", "listen_fd"})]
)
def test_every_setting_of_the_role_is_a_flag(run_command: RunCommand, role: Role, of_no_use: set[str]) -> None:
    outcome = run_command("serve", role, "--help")
    assert outcome.exit_code == 0
    flags = {flag.replace("-", "_") for flag in re.findall(r"^  --([a-z0-9-]+)", outcome.stdout, re.MULTILINE)}
    assert flags - {"help"} == set(settings_class(role).model_fields) - of_no_use
    assert f"Usage: gradpost serve {role} [OPTIONS]" in outcome.stdout
    assert "[default: 127.0.0.1]" in " ".join(outcome.stdout.split())
    assert "auto|console|json" in outcome.stdout


@pytest.mark.parametrize(
    ("flags", "environ", "messages"),
    [
        (
            "--port 70000 --num-trainers 0",
            {},
            [
                "--port: input should be less than or equal to 65535, not '70000'",
                "--num-trainers: input should be greater than or equal to 1, not '0'",
            ],
        ),
        ("--log-format xml", {}, ["--log-format: input should be 'auto', 'console' or 'json', not 'xml'"]),
        ("--coordinator x", {}, None),
        ("", {"LEASE_SECONDS": "soon"}, ["GRADPOST_LEASE_SECONDS: input should be a valid number, unable to parse "
                                         "string as a number, not 'soon'"]),
        ("--tls-cert one.pem", {}, ["tls_cert and tls_key go together: give both or neither"]),
        ("--port x", {"PROT": "1"}, ["unknown environment variable GRADPOST_PROT; did you mean GRADPOST_PORT?"]),
        ("", {"SETTINGS_FILE": "wrong.toml"}, ["num_trainers in wrong.toml: input should be greater than or equal "
                                               "to 1, not '0'"]),
        ("--tls-cert one.pem --tls-key other.key", {}, ["the TLS key other.key does not belong to the certificate "
                                                        "one.pem"]),
        ("--advertise-address c", {}, ["--advertise-address: expected a base URL such as http://10.0.0.5:7070, "
                                       "got 'c', not 'c'"]),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_line_each(
    run_command: RunCommand,
    served: list[ServiceSettings],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: str,
    environ: dict[str, str],
    messages: list[str] | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.toml").write_text("num_trainers = 0")
    authority = Authority(Path())
    authority.issue("one")
    authority.issue("other")
    for name, value in environ.items():
        monkeypatch.setenv(PREFIX + name, value)
    outcome = run_command("serve", "coordinator", *flags.split())
    assert (outcome.exit_code, outcome.stdout, served) == (2, "", [])
    if messages is None:
        assert outcome.stderr.endswith("Error: No such option: --coordinator\n")
    else:
        assert outcome.stderr.splitlines() == [f"gradpost: error: {message}" for message in messages]
