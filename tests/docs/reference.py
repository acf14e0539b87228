"""The generated parts of documents, and of the product. `make reference` writes them, and test_pages.py checks them."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from pydantic import AliasChoices, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

import gradpost
from gradpost.output import EXIT_CODES
from ps_config.environment import PREFIX
from ps_config.settings import Settings
from ps_protocol import errors, fields, membership, messages, requests, standbys
from ps_protocol.errors import ERRORS
from ps_protocol.fields import Message
from ps_protocol.membership import Membership
from ps_protocol.optimizers import RULES
from services.coordinator.process import measure_cluster
from services.coordinator.settings import CoordinatorSettings
from services.pserver.metrics import PserverMetrics
from services.pserver.settings import PserverSettings
from services.runtime.compute import ComputeExecutor
from services.runtime.metrics import ServiceMetrics
from services.runtime.security import ROUTE_SCOPES
from services.runtime.settings import ServiceSettings
from trainer_client.client.settings import TrainerSettings
from trainer_client.client.telemetry import TrainerMetrics
from trainer_client.optimizer.remote_optimizer import NamedOptimizer

from ..unit.coordinator.support import make_cluster
from .markdown import DOCS, ROOT, codes, read, section
from .test_openapi import FENCED, Document, read_documents

_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def put_table(text: str, heading: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the text with this table in place of the only one under the heading."""
    under = section(text, heading)
    [old] = _TABLE.findall(under)
    lines = [_line(columns), "|" + "---|" * len(columns) + "\n", *map(_line, rows)]
    return text.replace(under, under.replace(old, "".join(lines)))


def _line(cells: Sequence[str]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|\n"


def _code(words: Iterable[object]) -> str:
    return " ".join(f"`{word}`" for word in words)


# ---------------------------------------------------------------- docs/cli.md


def renew_cli(text: str) -> str:
    """Return the page with the exit codes and with typer's description of all commands."""
    text = put_table(text, "Exit codes", ("code", "meaning"), [(str(n), meaning) for n, meaning in EXIT_CODES.items()])
    return text.replace(section(text, "Reference"), f"\n\n{_describe_commands()}\n")


def _describe_commands() -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "typer", "gradpost.main", "utils", "docs", "--name", "gradpost"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    text = re.sub(r"^#", "###", done.stdout, flags=re.MULTILINE).strip()
    # The settings are in docs/settings.md.
    settings = re.compile(r"(##### `gradpost serve .*?\*\*Options\*\*:\n\n).*?(?=\* `--help`)", re.DOTALL)
    return settings.sub(r"\1* an option for each [setting](settings.md) of the role\n", text)


# ---------------------------------------------------------------- docs/metrics.md

UNITS = ("seconds", "bytes")
EXPOSED = {"counter": ("counter", "_total"), "info": ("gauge", "_info")}  # the type and the suffix on the page


def renew_metrics(text: str) -> str:
    """Return the page with the metrics that each role makes."""
    service, coordinator, pserver = ServiceMetrics("any").registry, CollectorRegistry(), CollectorRegistry()
    measure_cluster(make_cluster(), coordinator)
    PserverMetrics(pserver, ComputeExecutor())
    tables = {
        "Every service": _describe_metrics(service, "gradpost_"),
        "Coordinator": _describe_metrics(coordinator),
        "Pserver": _describe_metrics(pserver),
        "Trainer": _describe_metrics(TrainerMetrics().registry),
    }
    if sys.platform == "linux":  # prometheus_client exposes less of a process elsewhere
        tables["Process"] = _describe_metrics(service, "process_", "python_")
    for heading, rows in tables.items():
        text = put_table(text, heading, ("metric", "type", "labels", "unit", "meaning"), rows)
    return text


def _describe_metrics(registry: CollectorRegistry, *prefixes: str) -> Iterator[list[str]]:
    for collector in registry._collector_to_names:
        for family in collector.collect():
            if family.name.startswith(prefixes or ""):
                type_, suffix = EXPOSED.get(family.type, (family.type, ""))
                unit = next((unit for unit in UNITS if family.name.endswith(f"_{unit}")), "")
                labels = _code(_labels(collector, family))
                yield [_code([family.name + suffix]), type_, labels, unit, family.documentation]


def _labels(collector: Collector, family: Metric) -> list[str]:
    """Return the declared labels, which have no samples before they count, and those of samples made by reading."""
    shown = [label for sample in family.samples for label in sample.labels]
    return [label for label in dict.fromkeys([*getattr(collector, "_labelnames", ()), *shown]) if label != "le"]


# ---------------------------------------------------------------- docs/protocol-reference.md

# No client depends on the members of these; they are for reading.
INSPECTION = {
    "PserverState",
    "PserverStatus",
    "StandbyStatus",
    "TrainerStatus",
    "ClusterStatus",
    "RunSummary",
}


def renew_protocol(text: str) -> str:
    """Return the page with all requests, messages, optimizers and error codes."""
    classes = list_messages()
    names = {cls.__name__ for cls in classes}
    members = [(f"`{cls.__name__}`", _list_members(cls, names)) for cls in classes]
    errors = [
        (f"`{code}`", f"`{error.family.__name__}`", str(error.status), "yes" if error.may_be_retried else "no",
         error.meaning)
        for code, error in ERRORS.items()
    ]  # fmt: skip
    text = put_table(text, "Requests", ("request", "scope", "query, body", "answer", "purpose"), _list_requests())
    text = put_table(text, "Messages", ("message", "members"), members)
    optimizers = [(f"`{name}`", _code(rule.flags), _code(rule.numbers)) for name, rule in RULES.items()]
    text = put_table(text, "Optimizers", ("optimizer", "flags", "hyperparameters"), optimizers)
    return put_table(text, "Error codes", ("code", "class", "status", "retry", "meaning"), errors)


def list_messages() -> list[type[Message]]:
    """Return the classes of all messages, except those for reading."""
    return [
        cls
        for name, cls in ChainMap(*map(vars, (standbys, membership, requests, fields, messages))).items()
        if inspect.isclass(cls) and (cls is Membership or issubclass(cls, Message)) and cls is not Message
        and cls.__module__.startswith("ps_protocol") and name not in INSPECTION
    ]  # fmt: skip


def _list_requests() -> Iterator[list[str]]:
    """Yield the requests that the OpenAPI documents describe, in the order of the table of scopes."""
    described = ChainMap(*(document["paths"] for document in asyncio.run(read_documents()).values()))
    for (method, route), scope in ROUTE_SCOPES.items():
        path = route.replace(":path}", "}")
        if operation := described.get(path, {}).get(method.lower()):
            query = [parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "query"]
            answer = next(answer for status, answer in operation["responses"].items() if status.startswith("2"))
            purpose = operation["summary" if (method.lower(), path) in FENCED else "description"]
            yield [
                _code([f"{method} {path}"]), _code([scope] if scope else []),
                _code([*query, *_list_bodies(operation.get("requestBody", {}))]), _code(_list_bodies(answer)),
                purpose.partition("\n\n")[0].replace("\n", " ").rstrip("."),
            ]  # fmt: skip


def _list_bodies(described: Document) -> list[str]:
    """Return the message of a request or an answer, or the content type of other bodies."""
    return [
        _name_schema(content["schema"]) if kind == "application/json" else kind.removeprefix("application/")
        for kind, content in described.get("content", {}).items()
    ]


def _name_schema(schema: dict[str, Any]) -> str:
    if "items" in schema:
        return f"[{_name_schema(schema['items'])}]"
    return str(schema.get("$ref") or schema.get("title") or schema["type"]).rpartition("/")[2]


def _list_members(cls: type[Message], names: set[str]) -> str:
    """Return the members of a message with their defaults, if optional, and the message that each contains."""
    schema, listed = TypeAdapter(cls).json_schema(), []
    for name, member in schema["properties"].items():
        nested = [word for word in re.findall(r"#/\$defs/(\w+)", str(member)) if word in names]
        default = member.get("default", {})  # that of a factory is not in the schema
        shown = json.dumps({} if isinstance(default, dict) else default)  # all members of these objects are optional
        mark = "" if name in schema.get("required", ()) else f"={shown}"
        listed.append(f"`{name}{mark}`" + (f" (`{nested[0]}`)" if nested else ""))
    return " ".join(listed)


# ---------------------------------------------------------------- docs/settings.md

SETTINGS: dict[str, type[BaseSettings]] = {
    "Every process": Settings,
    "Every service": ServiceSettings,
    "Coordinator": CoordinatorSettings,
    "Pserver": PserverSettings,
    "Trainer": TrainerSettings,
}


def renew_settings(text: str) -> str:
    """Return the page with the settings of each role, those of all roles apart."""
    for heading, model in SETTINGS.items():
        rows = [
            (_code([name]), _code([_variable(name, field)]), _default(field.default), _meaning(field))
            for name, field in model.model_fields.items()
            if name in _declared_names(model)  # inherited ones have another table
        ]
        text = put_table(text, heading, ("setting", "variable", "default", "meaning"), rows)
    return text


def renew_names(_: str) -> str:
    """Return the file of all settings' names, by which each process refuses a misspelt one."""
    fields = {name: field for model in SETTINGS.values() for name, field in model.model_fields.items()}
    return "".join(f"{name}\n" for name in sorted(fields) if fields[name].validation_alias is None)


def _declared_names(model: type[BaseSettings]) -> set[str]:
    """Return the settings of a class and of its bases that belong to no other table."""
    classes = [cls for cls in (model, *model.__bases__) if cls is model or not issubclass(cls, BaseSettings)]
    return {name for cls in classes for name in inspect.get_annotations(cls)}


def _variable(name: str, field: FieldInfo) -> str:
    """Return the variable with precedence; the description names others."""
    if isinstance(field.validation_alias, AliasChoices):
        return next(str(alias) for alias in field.validation_alias.choices if alias != name)
    return PREFIX + name.upper()


def _default(default: Any) -> str:
    if default is None:
        return "none"
    return _code([str(default).lower() if isinstance(default, bool) else default])


def _meaning(field: FieldInfo) -> str:
    """Return the description, after the choices if it does not explain all of them."""
    description = field.description or ""
    choices = _choices(field.annotation)
    if set(choices) <= set(codes(description)):
        return description
    *others, last = (_code([choice]) for choice in choices)
    return f"{', '.join(others)} or {last}; {description}"


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in _choices(part)]


_ARGUMENTS = '''"""The settings of a trainer as keyword arguments: written by `make reference`."""

from pathlib import Path
from typing import Literal, TypedDict

class TrainerArguments(TypedDict, total=False):
    """The settings of a trainer as keyword arguments; None leaves one to the environment. docs/settings.md has more."""

'''


def renew_arguments(_: str) -> str:
    """Return the stub for type checkers and editors."""
    fields = {name: field.annotation for name, field in TrainerSettings.model_fields.items() if name != "coordinator"}
    return _ARGUMENTS + "".join(f"    {name}: {_write_type(kind)}\n" for name, kind in fields.items())


def _write_type(kind: Any) -> str:
    """Return the type of an argument, which may be None, as code."""
    parts = [part for part in get_args(kind | None) if part is not type(None)]
    texts = [
        f"Literal[{', '.join(map(json.dumps, get_args(part)))}]"
        if get_origin(part) is Literal
        else str(part)
        if get_args(part)
        else part.__name__
        for part in parts
    ]
    return " | ".join([*(["str"] if Path in parts else []), *texts, "None"])


# ---------------------------------------------------------------- docs/api.md


# Public methods for other packages of Gradpost, not for scripts.
INTERNAL = {
    "check_open", "check_process",  # Session
}  # fmt: skip


def renew_api(text: str) -> str:
    """Return the page with the signatures and docstrings of all public names, but for the errors."""
    order = ("connect", "RemoteOptimizer", "wrap_optimizers", "Session")
    assert {*order, *errors.__all__} == {*gradpost.__all__}
    shown = [_describe_name(f"gradpost.{name}", getattr(gradpost, name)) for name in order]
    own_step = _describe_callable("####", "NamedOptimizer.step", NamedOptimizer.step)
    shown.insert(3, _describe_callable("###", "NamedOptimizer", NamedOptimizer) + "\n" + own_step)
    return text.replace(section(text, "Reference"), "\n\n" + "\n".join(shown))


def _describe_name(name: str, value: Any) -> str:
    """Return the section of a class or function, with those of the public methods that are not torch's."""
    text = _describe_callable("###", name, value)
    classes = value.__mro__ if inspect.isclass(value) else ()
    own = [vars(cls) for cls in classes if cls.__module__.startswith("trainer_client")]
    for method, member in dict(ChainMap(*own)).items():
        if not method.startswith("_") and method not in INTERNAL and inspect.getdoc(member):
            text += "\n" + _describe_callable("####", f"{name.removeprefix('gradpost.')}.{method}", member)
    return text


def _describe_callable(level: str, name: str, value: Any) -> str:
    doc = inspect.getdoc(value) or ""
    if isinstance(value, property):
        return f"{level} {name}\n\nproperty: `{value.fget.__annotations__['return']}`\n\n```\n{doc}\n```\n"
    shown: list[str] = []
    for parameter in inspect.signature(value).parameters.values():
        if parameter.name == "arguments":
            shown.append("**arguments")  # docs/settings.md has them
            break
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        if parameter.name != "self":
            shown.append(_show_parameter(parameter))
    return f"{level} {name}\n\n```\n{name}({', '.join(shown)})\n\n{doc}\n```\n"


def _show_parameter(parameter: inspect.Parameter) -> str:
    """Return a parameter with its annotation, which is text, without quotes."""
    name, equals, default = str(parameter.replace(annotation=parameter.empty)).partition("=")
    return f"{name}: {parameter.annotation}" + (f" = {default}" if equals else "")


# Each function returns the text of its file with the generated parts renewed.
GENERATED: dict[str, Callable[[str], str]] = {
    "api.md": renew_api,
    "cli.md": renew_cli,
    "metrics.md": renew_metrics,
    "protocol-reference.md": renew_protocol,
    "settings.md": renew_settings,
    "../ps_config/names.txt": renew_names,
    "../trainer_client/client/arguments.pyi": renew_arguments,
}

if __name__ == "__main__":
    for name, renew in GENERATED.items():
        (DOCS / name).write_text(renew(read(name)), encoding="utf-8")
