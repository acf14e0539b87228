"""The commands in the documents, each held against what its program knows. Nothing of them is run."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Never

import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser

from gradpost.main import app
from ps_config.environment import KNOWN_VARIABLES

from .kubectl import check_kubectl
from .markdown import ROOT, code_blocks, codes, without_code

OWN = {"train.py"}  # the reader's
SCRIPTS = ("sh", "bash", "console")


def commands_of(text: str) -> Iterator[str]:
    """What a document says to type: the lines of its scripts, and what stands in backticks in its prose."""
    lines = [line.removeprefix("$ ") for kind in SCRIPTS for block in code_blocks(text, kind)
             for line in block.text.splitlines()]  # fmt: skip
    for line in [*lines, *codes(without_code(text))]:
        if re.match(rf"(\w+=\S* )*({'|'.join(PROGRAMS)}) ", line):
            yield re.sub(" +#.*", "", line)


def check(command: str) -> None:
    """Raises an AssertionError if a program, a flag, a name or a path in it does not exist."""
    words = shlex.split(command)
    while match := re.fullmatch(r"(\w+)=.*", words[0]):
        assert not match[1].startswith("GRADPOST_") or match[1] in KNOWN_VARIABLES, command
        words = words[1:]
    program, *words = words
    try:
        PROGRAMS[program](words)
    except (AssertionError, argparse.ArgumentError, KeyError) as error:
        raise AssertionError(f"{command}: {error!r}") from error


# ---------------------------------------------------------------------- our own


def check_gradpost(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    path = []
    while hasattr(command, "commands") and words and words[0] in command.commands:
        path.append(words[0])
        command = command.commands[words.pop(0)]
    if hasattr(command, "commands") and words and words[0][0].islower():  # else an option, or ROLE
        raise AssertionError(f"no command {words[0]!r}")
    parameters = command.get_params(typer.Context(command))
    known = {"--help", *(name for option in parameters for name in (*option.opts, *option.secondary_opts))}
    if "--" in words:
        check(shlex.join(words[words.index("--") + 1 :]))
        words = words[: words.index("--")]
    assert {word.partition("=")[0] for word in words if re.match("--?[a-z]", word)} <= known, known


def check_make(words: list[str]) -> None:
    """What it would run last is what the target is for."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", f"PYTHON={sys.executable}", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1].removeprefix(".venv/bin/")
    if last.split()[0] in PROGRAMS:
        check(last)


def check_python(words: list[str]) -> None:
    if words[0] == "-P":
        words = words[1:]
    is_module = words[0] == "-m"
    name, *arguments = words[1:] if is_module else words
    if name in OWN:
        return
    if is_module:
        spec = importlib.util.find_spec(name)
        assert spec, name
        path = Path(spec.origin or "")
    else:
        path = ROOT / name
        assert path.is_file(), name
    if arguments and arguments[0].startswith("-") and path.is_relative_to(ROOT):
        parse("-m" if is_module else "a file", name, *arguments)


def check_torchrun(words: list[str]) -> None:
    try:
        options = get_args_parser().parse_args(words)
    except SystemExit as error:
        raise AssertionError(words) from error
    check_python([options.training_script, *options.training_script_args])


# Runs a program until it has parsed its arguments.
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


def parse(kind: str, *words: str) -> None:
    command = [sys.executable, "-c", PARSE, kind, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def refuse(message: str) -> Never:
    raise AssertionError(message)


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if match := re.fullmatch(r"gradpost\[(\w+)\]", words[-1]):
        assert match[1] in extras, extras.keys()


# ---------------------------------------------------------------------- containers

COMPOSED = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


def check_docker(words: list[str]) -> None:
    """Services and profiles are those of the file. The flags are Compose's, as far as a document uses one."""
    docker = argparse.ArgumentParser(prog="docker", exit_on_error=False, allow_abbrev=False)
    compose = docker.add_subparsers(required=True).add_parser("compose", allow_abbrev=False)
    compose.add_argument("--profile", choices={name for one in COMPOSED.values() for name in one.get("profiles", [])})
    verbs = compose.add_subparsers(required=True, dest="verb")
    up, down, *others = (
        verbs.add_parser(verb, allow_abbrev=False) for verb in ("up", "down", "logs", "restart", "exec")
    )
    up.add_argument("--build", action="store_true")
    up.add_argument("-d", action="store_true")
    up.add_argument("--scale", type=lambda text: COMPOSED[text.partition("=")[0]] and int(text.partition("=")[2]))
    down.add_argument("--volumes", action="store_true")
    for parser in others:
        parser.add_argument("service", choices=COMPOSED)
    others[0].add_argument("-f", action="store_true")
    others[-1].add_argument("command", nargs="...")
    for parser in (docker, compose, up, down, *others):
        parser.error = refuse  # type: ignore[method-assign]
    if inside := getattr(docker.parse_args(words), "command", None):
        check(shlex.join(inside))


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "gradpost": check_gradpost,
    "make": check_make,
    "python": check_python,
    "python3": check_python,
    "torchrun": check_torchrun,
    "pip": check_pip,
    "docker": check_docker,
    "kubectl": check_kubectl,
}
