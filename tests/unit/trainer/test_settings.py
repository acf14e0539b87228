"""What a trainer can be told: arguments, environment and file, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps_config.certificates import CertificateError
from trainer_client import ParameterClient
from trainer_client.settings import read_settings


def test_an_argument_wins_over_the_environment_and_that_over_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "gradpost.toml"
    file.write_text('bucket_bytes = 1\nretry_seconds = 1\nplacement = "hash"\n')
    monkeypatch.setenv("GRADPOST_SETTINGS_FILE", str(file))
    monkeypatch.setenv("GRADPOST_RETRY_SECONDS", "2")
    monkeypatch.setenv("GRADPOST_PLACEMENT", "balanced")
    monkeypatch.setenv("RANK", "3")
    settings = read_settings(placement="round_robin", rank=None)
    assert (settings.bucket_bytes, settings.retry_seconds, settings.placement) == (1, 2.0, "round_robin")
    assert settings.rank == 3


# https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go: of a pod, for torchrun
TRAIN_JOB = {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "2", "JOB_COMPLETION_INDEX": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (None, None)),
        (TRAIN_JOB, (2, 4)),
        ({**TRAIN_JOB, "RANK": "5", "WORLD_SIZE": "8"}, (5, 8)),  # torchrun in it, two processes to a pod
        ({"JOB_COMPLETION_INDEX": "3"}, (3, None)),
        ({"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "6"}, (3, 6)),
        ({**TRAIN_JOB, "PET_NNODES": "1:4"}, (2, None)),
        ({**TRAIN_JOB, "RANK": "", "WORLD_SIZE": ""}, (2, 4)),
    ],
)
def test_rank_and_world_size_are_read_as_launchers_set_them(
    environ: dict[str, str], expected: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", *TRAIN_JOB):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings = read_settings()
    assert (settings.rank, settings.world_size) == expected
    settings = read_settings(rank=0, world_size=9)
    assert (settings.rank, settings.world_size) == (0, 9)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bucket_size", r"bucket_size is no setting of a trainer; did you mean bucket_bytes\?"),
        ("frobnicate", "frobnicate is no setting of a trainer$"),
    ],
)
def test_an_argument_that_is_no_setting_is_refused(name: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ParameterClient(**{name: 1})


def test_whose_certificates_readers_of_metrics_must_show_needs_tls(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    with pytest.raises(ValueError, match="tls_client_ca needs tls_cert and tls_key"):
        ParameterClient(tls_client_ca=tmp_path / "ca.pem")


@pytest.mark.asyncio
async def test_what_was_decided_by_joining_cannot_be_set_any_more() -> None:
    client = ParameterClient("http://127.0.0.1:9", metrics_port=None)
    client.configure(bucket_bytes=1000, placement=None)
    assert (client.settings.bucket_bytes, client.settings.coordinator) == (1000, "http://127.0.0.1:9")
    with pytest.raises(TypeError, match=r"retry_seconds cannot be set any more: pass it to connect\(\)"):
        client.configure(retry_seconds=3, bucket_bytes=2000)
    assert client.settings.bucket_bytes == 1000
    with pytest.raises(ValueError, match="bucket_bytes"):
        client.configure(bucket_bytes=0)


def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match=r"the TLS file .*ca\.pem cannot be read: No such file"):
        ParameterClient(tls_ca=tmp_path / "ca.pem")
