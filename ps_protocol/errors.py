"""Every error that crosses the wire: its code, its family and its status, in one table.

    GradpostError
    ├── BadInput            the request is wrong and changed nothing; sending it again will not help
    ├── Conflict            the request is stale or contradicts the run; `current` says what holds now
    ├── TryAgain            nothing is wrong; the same request again may succeed
    └── Ended               the awaited event will not happen; the message names the cause

An error is raised as its family with a code, `BadInput("no JSON", code="malformed_frame")`. A code that a program
handles separately has a class of its own. A service answers an error as an RFC 9457 problem document; the client
rebuilds the same exception from it with `error_from_problem`.
"""

# ruff: noqa: N818 - the names say what happened
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = [  # the classes, which are public names of gradpost, too
    "BadInput", "BadModel", "Conflict", "ContributionConflict", "ContributionMissing", "Ended", "Forbidden",
    "FutureRound", "GradpostError", "ModelMismatch", "NonFiniteGradient", "NormChanged", "NotFound", "NotReady",
    "RolledBack", "RoundPending", "RoundTimeout", "RunStopped", "StalePserver", "StaleRound", "StaleRun",
    "StorageFailed", "TrainerLost", "TryAgain", "Unauthenticated", "Unreachable", "UnsupportedFormat", "UpdatesGone",
]  # fmt: skip

PROBLEM_CONTENT_TYPE = "application/problem+json"
PROBLEM_TYPE_PREFIX = "urn:gradpost:error:"


class GradpostError(Exception):
    """Base of all errors; `facts` are the document's extra members (`expected`, `actual`, `current`, …)."""

    code: str  # of an error that is raised without one: the first of its class in ERRORS
    retry_after_seconds: float | None = None  # at a client: what the answer's `Retry-After` said

    def __init__(self, detail: str, /, *, code: str | None = None, **facts: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.facts = facts
        if code is not None:
            self.code = code

    @property
    def status(self) -> int:
        return ERRORS[self.code].status

    @property
    def may_be_retried(self) -> bool:
        """True if the same request may succeed later."""
        return ERRORS[self.code].may_be_retried

    def __str__(self) -> str:
        facts = "; ".join(f"{key} {value}" for key, value in self.facts.items() if key in ("expected", "actual"))
        return f"{self.detail} ({facts})" if facts else self.detail

    def to_problem(self) -> dict[str, Any]:
        """The RFC 9457 problem document."""
        return {
            **self.facts,  # first, so that none of them can pose as one of the standard's members
            "type": PROBLEM_TYPE_PREFIX + self.code,
            "title": self.code.replace("_", " "),
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "may_be_retried": self.may_be_retried,
        }


class BadInput(GradpostError):
    """The request is wrong and changed nothing."""


class NonFiniteGradient(BadInput):
    """A gradient holds NaN or infinity and the policy is `reject`."""


class BadModel(BadInput):
    """The run cannot be planned with these parameters, mode and wire types."""


class NotFound(BadInput):
    """There is no such path, parameter or member."""


class Unauthenticated(BadInput):
    """The request carries no bearer token, or none that the service knows."""


class Forbidden(BadInput):
    """The token's scope does not cover the request; `needed` and `given` say which."""


class Conflict(GradpostError):
    """The request is stale or contradicts the run."""


class StaleRun(Conflict):
    """The request belongs to another run or attempt."""


class StalePserver(Conflict):
    """The request was meant for another pserver, or for another incarnation of this one."""


class StaleRound(Conflict):
    """The round is over, its version is overwritten, or it is before this trainer's first round.

    In asynchronous modes: the step of a gradient is not that of an answered get.
    """


class FutureRound(Conflict):
    """The round is not open yet."""


class NormChanged(Conflict):
    """The round's gradient has changed since the get's global norm was computed: read the norms again."""


class RolledBack(Conflict):
    """The run was rolled back to `round`; training continues after it."""


class ContributionConflict(Conflict):
    """The bytes of a contribution differ from those sent before under the same identity."""


class ContributionMissing(Conflict):
    """A batch barrier came before this pserver had the trainer's whole contribution; push it again."""


class ModelMismatch(Conflict):
    """The trainer's model is not the one that the run's other trainers declared."""


class TryAgain(GradpostError):
    """Nothing is wrong; the same request again may succeed."""


class NotReady(TryAgain):
    """The service has no run, or not all initial values; `waiting_for` says what is missing."""


class RoundPending(TryAgain):
    """The barrier is not complete; `missing` names the trainers that it waits for."""


class Ended(GradpostError):
    """An awaited event that will not happen: the run, the trainer or the service has ended."""


class TrainerLost(Ended):
    """A trainer's lease ran out or it failed, and the run cannot go on without it."""


class RoundTimeout(Ended):
    """A trainer is alive but did not reach the barrier in time."""


class RunStopped(Ended):
    """An administrator stopped the run."""


class StorageFailed(Ended):
    """A disk does not store the data that `durability` demands."""


class UnsupportedFormat(StorageFailed):
    """Another version wrote a log or checkpoint that this version cannot read."""


class UpdatesGone(Ended):
    """The log does not reach back to the round any more: begin with a copy of the shard, or the checkpoint `begin`."""


class Unreachable(Ended):
    """A service did not answer for the whole retry time. Raised by the client, never sent."""


class ErrorCode(NamedTuple):
    """A code on the wire, and the class that an error with this code is raised and rebuilt as."""

    code: str
    family: type[GradpostError]
    status: int
    may_be_retried: bool
    meaning: str


_TABLE = (  # code, family, status, may be retried, meaning
    ("internal_error", GradpostError, 500, False, "a bug; the service's log has the traceback"),
    ("bad_request", BadInput, 400, False, "the request is wrong and changed nothing"),
    ("malformed_frame", BadInput, 400, False, "the body is not a complete safetensors stream, or its metadata is "
    "wrong"),
    ("bad_header", BadInput, 400, False, "a `gradpost-` header is missing or invalid"),
    ("unsupported_protocol", BadInput, 400, False, "the sender uses another version of the protocol"),
    ("body_too_large", BadInput, 413, False, "a body, a frame's header or its number of tensors is above the limit"),
    ("length_required", BadInput, 411, False, "a frame came without a Content-Length"),
    ("unsupported_content_coding", BadInput, 415, False, "the request has a `Content-Encoding`"),
    ("invalid_message", BadInput, 422, False, "a JSON message or a query does not fit its schema"),
    ("unknown_block", BadInput, 422, False, "the block is not in the plan, or is on another pserver"),
    ("wrong_shape", BadInput, 422, False, "the block's shape is not the plan's"),
    ("wrong_dtype", BadInput, 422, False, "the block's dtype is not the plan's"),
    ("non_finite_gradient", NonFiniteGradient, 422, False, "a gradient holds NaN or infinity, under `reject`; "
    "trainers raise it"),
    ("gradient_changed", BadInput, 422, False, "a script changed a gradient that `overlap` had sent"),
    ("bad_model", BadModel, 422, False, "the declared parameters or settings cannot be planned"),
    ("unsupported_optimizer", BadInput, 422, False, "the optimizer is not on the list, or has wrong flags"),
    ("bad_hyper_parameters", BadInput, 422, False, "the hyperparameters of a push do not fit the run's optimizer"),
    ("not_found", NotFound, 404, False, "there is no such path or parameter"),
    ("method_not_allowed", BadInput, 405, False, "the path exists, but not with this method"),
    ("unauthenticated", Unauthenticated, 401, False, "no valid bearer token; `needed` is the required scope"),
    ("forbidden", Forbidden, 403, False, "the token's scope does not cover the request; see `needed` and `given`"),
    ("bad_host", BadInput, 421, False, "the host name of the request is not one of the service's"),
    ("bad_origin", BadInput, 403, False, "a page of another site made a browser send the request"),
    ("conflict", Conflict, 409, False, "the request contradicts the run"),
    ("stale_run", StaleRun, 409, False, "the request belongs to another run or attempt"),
    ("plan_mismatch", Conflict, 409, False, "the request was made for another slice plan"),
    ("stale_pserver", StalePserver, 409, False, "the request was meant for another pserver or incarnation"),
    ("stale_trainer", Conflict, 409, False, "the trainer is not a member, is not the uploader, or has rejoined"),
    ("stale_round", StaleRound, 409, False, "the round is over, before the trainer's first, or not that of an "
    "answered get"),
    ("cannot_evict", Conflict, 409, False, "the run could not continue without this trainer"),
    ("future_round", FutureRound, 409, False, "the round is not open yet"),
    ("norm_changed", NormChanged, 409, False, "the gradient has changed since its norm was read; read the norm again"),
    ("no_update_log", Conflict, 409, False, "the run has no log, so that its updates cannot be read"),
    ("diverged", Conflict, 409, False, "the reader's last update is another one than in the log of the pserver"),
    ("superseded", Conflict, 409, False, "a standby has replaced the pserver, whose process may follow it now"),
    ("not_leader", StalePserver, 409, False, "the process follows a pserver, `current`, and serves only reads"),
    ("replica_mismatch", Conflict, 409, False, "a follower has another build of torch or CPU capability than its "
    "leader"),
    ("delay_exceeded", Conflict, 409, False, "a gradient was computed on parameters older than `max_delay` allows"),
    ("rolled_back", RolledBack, 409, False, "the run was rolled back to an earlier `round`; clients raise it"),
    ("contribution_conflict", ContributionConflict, 409, False, "the same identity was sent with other bytes before"),
    ("contribution_missing", ContributionMissing, 409, False, "a batch barrier came before the whole contribution"),
    ("rank_taken", Conflict, 409, True, "a living trainer has this rank"),
    ("index_taken", Conflict, 409, True, "a living pserver has this index"),
    ("world_mismatch", Conflict, 409, False, "the rank, the world size or the index does not fit the cluster"),
    ("mode_mismatch", Conflict, 409, False, "the trainer was started for another mode"),
    ("no_pservers", Conflict, 409, False, "with strategy `ring` there are no pservers"),
    ("model_mismatch", ModelMismatch, 409, False, "the trainer declares another model than the others, or than before"),
    ("try_again", TryAgain, 503, True, "nothing is wrong; the same request may succeed"),
    ("not_ready", NotReady, 503, True, "something has not begun; `waiting_for` names what is missing"),
    ("round_pending", RoundPending, 503, True, "the barrier is not complete; `missing` names the trainers"),
    ("queue_full", TryAgain, 503, True, "a block's queue has no room for the contribution"),
    ("overloaded", TryAgain, 503, True, "the service has too many requests, or bytes of bodies, at once"),
    ("stopping", TryAgain, 503, True, "the pserver stops; its next incarnation or a standby answers the same request"),
    ("slow_body", TryAgain, 408, True, "the body did not arrive in time and was discarded"),
    ("ended", Ended, 410, False, "the event that the caller waits for will not happen"),
    ("updates_gone", UpdatesGone, 410, False, "the log no longer reaches back to the round; begin with a copy"),
    ("trainer_lost", TrainerLost, 410, False, "a trainer is lost, and the policy does not let the run continue"),
    ("trainer_left", Ended, 410, False, "a trainer of a ring left before the last round"),
    ("ring_broken", Ended, 504, False, "the ring's connections broke, and no trainer was lost; trainers raise it"),
    ("host_broken", Ended, 504, False, "a process of the host ended, failed or hangs; trainers raise it"),
    ("pserver_lost", Ended, 410, False, "a pserver and its shard are lost for good"),
    ("standby_lost", Ended, 504, False, "a required standby did not confirm an update in time"),
    ("round_timeout", RoundTimeout, 504, False, "trainers did not reach the barrier, or upload, in time"),
    ("run_over", Ended, 410, False, "the run is finished and this cluster serves no other"),
    ("run_stopped", RunStopped, 410, False, "an administrator stopped the run"),
    ("apply_failed", Ended, 500, False, "the optimizer failed on a pserver; its shard is in an unknown state"),
    ("non_finite_update", Ended, 410, False, "finite gradients have overflowed, or a client does not check "
    "them; the update was not applied"),
    ("storage_failed", StorageFailed, 507, False, "a write to a disk failed, or a folder cannot be used"),
    ("unsupported_format", UnsupportedFormat, 507, False, "another version wrote a log or checkpoint"),
    ("unreachable", Unreachable, 504, False, "a service did not answer for the whole retry time; clients raise it"),
)  # fmt: skip

ERRORS: Mapping[str, ErrorCode] = {row[0]: ErrorCode(*row) for row in _TABLE}
for _error in reversed(tuple(ERRORS.values())):
    _error.family.code = _error.code
for _name in __all__:
    globals()[_name].__module__ = "gradpost"  # tracebacks print the public name

_DOCUMENT_MEMBERS = frozenset({"instance", "type", "title", "status", "detail", "code", "may_be_retried"})


def error_from_answer(content: bytes) -> GradpostError | None:
    """Rebuild the exception of an answer that is one of our problem documents; None for anything else.

    >>> error_from_answer(b'{"type": "urn:gradpost:error:not_found", "code": "not_found", "detail": "no such path"}')
    NotFound('no such path')
    >>> error_from_answer(b'{"code": "404", "message": "no healthy upstream"}')
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(document, dict) and str(document.get("type")).startswith(PROBLEM_TYPE_PREFIX)
    return error_from_problem(document) if is_ours else None


def error_from_problem(problem: Mapping[str, Any]) -> GradpostError:
    """Rebuild the exception. Raises ValueError if that is no object.

    An unknown code becomes the fact `unknown_code` of a GradpostError.

    >>> error_from_problem({"code": "stale_round", "detail": "round 3 is over", "current": 5}).facts
    {'current': 5}
    """
    if not isinstance(problem, Mapping):
        raise ValueError(f"not a problem document: {problem!r}")
    code = str(problem.get("code"))
    detail = str(problem.get("detail") or problem.get("title") or "no detail was given")
    facts = {str(key): value for key, value in problem.items() if key not in _DOCUMENT_MEMBERS}
    if code in ERRORS:
        return ERRORS[code].family(detail, code=code, **facts)
    return GradpostError(detail, **{**facts, "unknown_code": code})
