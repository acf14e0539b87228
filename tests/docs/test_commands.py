"""Every command in the documents exists: its program, subcommand, flags, and the files and objects that it names.

Other tests run the blocks of `sh`. Blocks of `bash` are not run: they need containers, Kubernetes, other packages or
many minutes.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser

from gradpost.main import app
from ps_config.environment import KNOWN_VARIABLES

from .markdown import DOCUMENTS, ROOT, code_blocks, codes, examples, without_code

TEXTS = [path.read_text(encoding="utf-8") for path in DOCUMENTS]
NOT_RUN = [line for text in TEXTS for block in examples(text, "bash") for line in block.text.splitlines()]
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
OBJECTS = {
    f"{one['kind'].lower()}/{one['metadata']['name']}"
    for file in (ROOT / "deploy" / "kubernetes" / "base").glob("*.yaml")
    for one in yaml.safe_load_all(file.read_text())
    if "metadata" in one
}


def commands_of(text: str) -> Iterator[str]:
    """Yield the commands of a document: the lines of its scripts, and those in backticks in its prose."""
    blocks = [block for kind in ("sh", "bash", "console") for block in code_blocks(text, kind)]
    lines = [line.removeprefix("$ ") for block in blocks for line in block.text.splitlines()]
    for line in [*lines, *codes(without_code(text))]:
        if re.match(rf"(\w+=\S* )*({'|'.join(PROGRAMS)}) ", line):
            yield re.sub(" +#.*", "", line)


def check(command: str) -> None:
    """Raise an AssertionError if a part of the command does not exist."""
    words = shlex.split(command)
    while match := re.fullmatch(r"(\w+)=.*", words[0]):
        assert not match[1].startswith("GRADPOST_") or match[1] in KNOWN_VARIABLES, command
        words = words[1:]
    PROGRAMS[words[0]](words[1:])


def check_gradpost(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and words[0][0].islower():  # else an option, or ROLE
        assert words[0] in command.commands, words
        command = command.commands[words.pop(0)]
    parameters = command.get_params(typer.Context(command))
    known = {"--help", *(name for option in parameters for name in (*option.opts, *option.secondary_opts))}
    if "--" in words:
        check(shlex.join(words[words.index("--") + 1 :]))
        words = words[: words.index("--")]
    assert {word.partition("=")[0] for word in words if re.match("--?[a-z]", word)} <= known, known


def check_make(words: list[str]) -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    command = ["make", "--no-print-directory", "--dry-run", f"PYTHON={sys.executable}", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1].removeprefix(".venv/bin/")  # the purpose of the target
    if last.split()[0] in PROGRAMS:
        check(last)


# Run a program until it has parsed its arguments.
PARSE = """
import argparse, runpy, sys
parse_args = argparse.ArgumentParser.parse_args
def parse_and_stop(parser):
    parse_args(parser)
    sys.exit()
argparse.ArgumentParser.parse_args = parse_and_stop
_, kind, *sys.argv = sys.argv
(runpy.run_module if kind == "-m" else runpy.run_path)(sys.argv[0], run_name="__main__")
sys.exit("it did not parse its arguments")
"""


def check_python(words: list[str]) -> None:
    words = words[words[0] == "-P" :]
    kind = "-m" if words[0] == "-m" else "a file"
    name, *arguments = words[1:] if kind == "-m" else words
    if name == "train.py":  # the reader's
        return
    if kind == "-m":
        spec = importlib.util.find_spec(name)
        assert spec, name
        path = Path(spec.origin or "")
    else:
        path = ROOT / name
        assert path.is_file(), name
    if arguments and arguments[0].startswith("-") and path.is_relative_to(ROOT):
        command = [sys.executable, "-c", PARSE, kind, name, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def check_torchrun(words: list[str]) -> None:
    try:
        options = get_args_parser().parse_args(words)
    except SystemExit as error:
        raise AssertionError(words) from error
    check_python([options.training_script, *options.training_script_args])


def check_docker(words: list[str]) -> None:
    """Check the services and profiles that a command of Compose names."""
    text = shlex.join(words)
    assert re.match(r"compose (--profile \w+ )?(up|down|logs|restart|exec)\b", text), text
    profiles = {name for one in SERVICES.values() for name in one.get("profiles", [])}
    assert set(re.findall(r"--profile (\w+)", text)) <= profiles
    named = re.findall(r"--scale (\w+)=", text) + re.findall(r"(?:restart|exec|logs)(?: -f)? ([\w-]+)", text)
    assert named or "up" in words or "down" in words
    assert set(named) <= SERVICES.keys()
    if "exec" in words:
        check(shlex.join(words[words.index("exec") + 2 :]))


def check_kubectl(words: list[str]) -> None:
    """Check the objects and folders that a command names."""
    if words[0] == "-n":
        assert f"namespace/{words[1]}" in OBJECTS
        words = words[2:]
    if words[0] == "apply":
        assert (ROOT / words[2] / "kustomization.yaml").is_file()
    named = re.findall(r"\b(?:job|statefulset|deployment|service|namespace)[/ ][\w-]+", shlex.join(words))
    assert {name.replace(" ", "/") for name in named} <= OBJECTS, OBJECTS


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "gradpost": check_gradpost,
    "make": check_make,
    "python": check_python,
    "python3": check_python,
    "torchrun": check_torchrun,
    "docker": check_docker,
    "kubectl": check_kubectl,
}
COMMANDS = list(dict.fromkeys(command for text in TEXTS for command in commands_of(text)))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_documents_exists(command: str) -> None:
    check(command)


def test_only_commands_that_cannot_run_here_are_not_run() -> None:
    for line in NOT_RUN:
        command = line.partition("  #")[0].rstrip()
        assert line.startswith(("#", "pip install ")) or command in COMMANDS, f"no test checks {line!r}"
        assert not line.startswith(("gradpost ", "curl ")), f"{line!r} can be run: make its block one of sh"


@pytest.mark.parametrize(
    "command",
    [
        "gradpost frobnicate",
        "gradpost checkpoint frobnicate",
        "gradpost serve coordinator --pserver-index 0",
        "gradpost up --frobnicate 1 -- python train.py",
        "gradpost up -- python examples/letters.py",
        "GRADPOST_FROBNICATE=1 gradpost status",
        "make frobnicate",
        'make chaos ARGS="--only frobnicate"',
        "python -m benchmarks.faults.recovery --frobnicate",
        "python benchmarks/placements.py",
        "docker compose frobnicate",
        "docker compose restart pserver-7",
        "docker compose --profile frobnicate up",
        "kubectl -n gradpost delete job trainers",
        "kubectl apply -k deploy/kubernetes/overlays/moon",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    with pytest.raises(AssertionError):
        check(command)
