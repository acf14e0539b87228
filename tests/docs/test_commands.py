"""Every command in the documents is one that its program understands, and names what is there.

Blocks of `sh` are run by the tests of their documents. Those of `bash` are not: they want an engine of containers, a
cluster of Kubernetes, packages from the network or many minutes.
"""

from __future__ import annotations

import pytest

from .commands import check, commands_of
from .markdown import DOCUMENTS, ROOT, examples

TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in DOCUMENTS}
COMMANDS = [(name, command) for name, text in TEXTS.items() for command in dict.fromkeys(commands_of(text))]
NOT_RUN = [line for text in TEXTS.values() for block in examples(text, "bash") for line in block.text.splitlines()]


@pytest.mark.parametrize(("document", "command"), COMMANDS)
def test_it_is_understood(document: str, command: str) -> None:
    check(command)


def test_what_is_not_run_is_what_cannot_be() -> None:
    understood = {command for _, command in COMMANDS}
    for line in NOT_RUN:
        assert line.startswith("#") or line.partition("  #")[0].rstrip() in understood, f"nobody checks {line!r}"
        assert not line.startswith(("gradpost ", "curl ")), f"{line!r} can be run: make its block one of sh"


@pytest.mark.parametrize(
    "command",
    [
        "gradpost frobnicate",
        "gradpost status --frobnicate",
        "gradpost checkpoint frobnicate",
        "gradpost serve coordinator --pserver-index 0",
        "gradpost up --frobnicate 1 -- python train.py",
        "gradpost up -- python examples/letters.py",
        "GRADPOST_FROBNICATE=1 gradpost status",
        "make frobnicate",
        'make chaos ARGS="--only frobnicate"',
        "python -m benchmarks.faults.frobnicate",
        "python -m benchmarks.faults.recovery --frobnicate",
        "python benchmarks/placements.py",
        'pip install "gradpost[frobnicate]"',
        "docker compose frobnicate",
        "docker compose restart pserver-7",
        "docker compose up --scale trainers=4",
        "docker compose up --frobnicate",
        "docker compose --profile frobnicate up",
        "docker compose exec coordinator gradpost token show --scope read --frobnicate",
        "kubectl -n gradpost delete job trainers",
        "kubectl -n elsewhere delete job trainer",
        "kubectl apply -k deploy/kubernetes/overlays/moon",
        "kubectl -n gradpost port-forward service/coordinator 7071",
        "kubectl -n gradpost create secret generic tokens --from-file tokens",
    ],
)
def test_what_is_not_there_is_refused(command: str) -> None:
    with pytest.raises(AssertionError):
        check(command)
