"""The base of messages, the types of their fields, and the reports of a process about itself.

Fields are strict and bounded, with their bounds in openapi.json.

A JSON `true` is no number, `1` and `"1"` are no `true` and no `1`; an integer is a number, too.
"""

from __future__ import annotations

from typing import Annotated, Any, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from .fence import MAX_DIGITS, MAX_TEXT, is_decimal
from .vocabulary import PROTOCOL_VERSION

V = TypeVar("V")

MAX_INTEGER = (1 << 63) - 1
MAX_ORDINAL = 10**MAX_DIGITS - 1  # what fits into a `gradpost-` header
MAX_MEMBERS = 1 << 16  # ranks, pservers or rounds that a collection lists
MAX_TENSORS = 1 << 20  # parameters, buffers or aliases of a model
MAX_NAME = 1000  # characters of a tensor's name
MAX_REASON = 2000  # characters of the reason of a trainer's end
MAX_NOTE = 10_000
MAX_RESULTS = 256  # results of a trainer
OWN_RESULTS = "gradpost/"  # begins the names of curves that trainers measure themselves
MAX_OWN_RESULTS = 3
MAX_RESULT_NAME = 200
MAX_URL = 500


class Message(BaseModel):
    """Base of all messages in JSON: frozen, without unknown fields.

    JSON cannot express NaN, which a loss may be: it is sent as the string "NaN" and read as the number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    @classmethod
    def from_answer(cls, body: bytes) -> Self:
        """Read a service's answer without unknown members, which a later version may add. Raises ValidationError."""
        return cls.model_validate_json(body, extra="ignore")


Integer: TypeAlias = Annotated[int, Field(strict=True, ge=-MAX_INTEGER, le=MAX_INTEGER)]
Count: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER)]
Positive: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=MAX_INTEGER)]
Flag: TypeAlias = Annotated[bool, Field(strict=True)]
Real: TypeAlias = Annotated[float, Field(strict=True, allow_inf_nan=False)]

Ordinal: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=MAX_ORDINAL)]
Rank: TypeAlias = Ordinal
Round: TypeAlias = Ordinal
Incarnation: TypeAlias = Ordinal
PserverIndex: TypeAlias = Ordinal


def _read_ordinal(value: object) -> object:
    if isinstance(value, str) and not is_decimal(value):
        raise ValueError(f"must be a number of at most {MAX_DIGITS} digits")
    return value


# An Ordinal in a path, in a query, or as the key of an object, where JSON has text only.
OrdinalText: TypeAlias = Annotated[int, Field(ge=0, le=MAX_ORDINAL), BeforeValidator(_read_ordinal)]
ByOrdinal: TypeAlias = Annotated[
    dict[OrdinalText, V],
    Field(max_length=MAX_MEMBERS, json_schema_extra={"propertyNames": {"pattern": f"^[0-9]{{1,{MAX_DIGITS}}}$"}}),
]
Ordinals: TypeAlias = Annotated[tuple[Ordinal, ...], Field(max_length=MAX_MEMBERS)]

_NONFINITE = ("NaN", "Infinity", "-Infinity")


def _read_number(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, str) and value not in _NONFINITE):
        raise ValueError(f"must be a number or one of {', '.join(_NONFINITE)}")
    return value


# A number that may be NaN or infinite, for which JSON has no word.
Number: TypeAlias = Annotated[
    float,
    BeforeValidator(_read_number),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "enum": list(_NONFINITE)}]}),
]

Identifier: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_TEXT, pattern="^[ -~]+$")]  # of a run or plan
Label: TypeAlias = Annotated[str, Field(max_length=MAX_TEXT)]
Name: TypeAlias = Annotated[str, Field(max_length=MAX_NAME)]
Text: TypeAlias = Annotated[str, Field(max_length=MAX_NOTE)]
Reason: TypeAlias = Annotated[str, Field(max_length=MAX_REASON)]
Instance: TypeAlias = Annotated[str, Field(min_length=8, max_length=64)]  # a random id of a process
Protocol: TypeAlias = Annotated[Integer, Field(json_schema_extra={"const": PROTOCOL_VERSION})]
LocalName: TypeAlias = Annotated[str, Field(pattern=r"^gradpost-[0-9a-f]{32}$")]  # see ps_http2.local_sockets
Object: TypeAlias = Annotated[dict[str, Any], Field(max_length=100)]


def _cut_note(value: object) -> object:
    return value[: MAX_NOTE - 1] + "…" if isinstance(value, str) and len(value) > MAX_NOTE else value


# Text for people that a service composes, and that may grow with the cluster.
Note: TypeAlias = Annotated[str, BeforeValidator(_cut_note), Field(max_length=MAX_NOTE)]


def check_result_name(name: str) -> str:
    """Return the name of a reported number. Raises ValueError unless it is short and can be printed.

    >>> check_result_name("val/loss")
    'val/loss'
    """
    if not (0 < len(name) <= MAX_RESULT_NAME and name.isprintable()):
        raise ValueError(
            f"the name of a result must have 1 to {MAX_RESULT_NAME} printable characters, not {name!r:.80}"
        )
    return name


_RESULT_NAMES: dict[str, Any] = {
    "propertyNames": {"minLength": 1, "maxLength": MAX_RESULT_NAME, "pattern": r"^\P{C}+$"}
}
ResultName: TypeAlias = Annotated[str, AfterValidator(check_result_name)]
Results: TypeAlias = Annotated[dict[ResultName, Number], Field(max_length=MAX_RESULTS, json_schema_extra=_RESULT_NAMES)]


class Mean(Message):
    """The mean of values that a script reported, and their number. A mean with a NaN is NaN."""

    count: Positive
    value: Number

    def merge(self, other: Mean) -> Mean:
        """Return the mean of the values of both.

        >>> Mean(count=3, value=1.0).merge(Mean(count=1, value=5.0))
        Mean(count=4, value=2.0)
        """
        count = self.count + other.count
        return Mean(count=count, value=self.value + (other.value - self.value) * (other.count / count))


Means: TypeAlias = Annotated[
    dict[ResultName, Mean], Field(max_length=MAX_RESULTS + MAX_OWN_RESULTS, json_schema_extra=_RESULT_NAMES)
]


def _check_base_url(value: str) -> str:
    url = urlsplit(value)  # raises ValueError, as `port` does
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment or url.port == 0:
        raise ValueError("must be a base URL such as http://10.0.0.7:7071")
    if any(character.isspace() for character in value):
        raise ValueError("a URL must not have spaces")
    return value


BaseUrl: TypeAlias = Annotated[
    str, AfterValidator(_check_base_url), Field(max_length=MAX_URL, json_schema_extra={"format": "uri"})
]


def _check_origin(value: str) -> str:
    url = urlsplit(_check_base_url(value))
    if url.path not in ("", "/") or "@" in url.netloc:
        raise ValueError("must be only a scheme, a host and a port, such as http://10.0.0.7:7072")
    return value


# A base URL without a path and without a user's name.
OriginUrl: TypeAlias = Annotated[
    str, AfterValidator(_check_origin), Field(max_length=MAX_URL, json_schema_extra={"format": "uri"})
]


# ---------------------------------------------------------------- the reports of a process, with its heartbeats

Amount = Annotated[Real, Field(ge=0)]


class Software(Message):
    """The software versions of a process."""

    gradpost: Label
    python: Label
    torch: Label


class ScriptInfo(Message):
    """The script of a trainer, for its readers."""

    command: Note = Field(description="command line, as the script sees it")
    run_name: Label | None = Field(default=None, description="name that the script gave to the run")
    optimizer: Note = Field(default="", description="optimizer with the hyperparameters that are not its defaults")
    total_rounds: Count | None = Field(
        default=None, description="rounds, or steps of the trainer, after which the script ends, if it is known"
    )


class ProcessFigures(Message):
    """The resources of the host that a process uses. A figure is null if the platform does not provide it.

    Seconds and bytes are totals of the process, so that a rate is the difference of two reports.
    """

    host: Label
    cpu_seconds: Amount = Field(description="CPU time; one a second is one busy core")
    resident_bytes: Count = Field(description="main memory")
    gpu_bytes: Count | None = Field(default=None, description="memory of tensors on CUDA devices; null without CUDA")
    read_bytes: Count | None = Field(default=None, description="from disks")
    written_bytes: Count | None = Field(default=None, description="to disks")
    sent_bytes: Count | None = Field(
        default=None, description="tensors sent to pservers or, by a pserver, to trainers; null in a ring"
    )
    received_bytes: Count | None = Field(default=None, description="tensors received, likewise")
