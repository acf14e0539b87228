"""Every command of ours in the documents exists: its program, subcommand, flags and files.

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
from typing import Any

import pytest
import typer

from gradpost.main import app
from ps_config.environment import KNOWN_VARIABLES

from .markdown import DOCUMENTS, ROOT, code_blocks, codes, examples, without_code

TEXTS = [path.read_text(encoding="utf-8") for path in DOCUMENTS]
for text in TEXTS:
    examples(text, "bash")


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
    if words[0] in PROGRAMS:
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


def check_python(words: list[str]) -> None:
    words = words[words[0] == "-P" :]
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]), words
    else:
        assert words[0] == "train.py" or (ROOT / words[0]).is_file(), words  # the former is the reader's


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "gradpost": check_gradpost,
    "make": check_make,
    "python": check_python,
    "python3": check_python,
}
COMMANDS = list(dict.fromkeys(command for text in TEXTS for command in commands_of(text)))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_documents_exists(command: str) -> None:
    check(command)
