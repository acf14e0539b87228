"""Every error that crosses the wire: one tree, one table, one shape.

    GradpostError
    ├── BadInput            the request is wrong and changed nothing; sending it again will not help
    ├── Conflict            the request is stale or at odds with the run; `current` says what holds now
    ├── TryAgain            nothing is wrong; the same request again may succeed
    └── Ended               what the caller waits for will not come; the message names who is to blame

Code, class, HTTP status and "may be retried" are attributes of the classes. A service answers an error as an
RFC 9457 problem document; the client rebuilds the same exception from it with `error_from_problem`.
"""

# ruff: noqa: N818 - the names say what happened
from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

PROBLEM_CONTENT_TYPE = "application/problem+json"
PROBLEM_TYPE_PREFIX = "urn:gradpost:error:"


class GradpostError(Exception):
    """Base of all errors; `facts` are the document's extra members (`expected`, `actual`, `current`, …)."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    may_be_retried: ClassVar[bool] = False
    retry_after_seconds: float | None = None  # at a client: what the answer's `Retry-After` said

    def __init__(self, detail: str, /, **facts: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.facts = facts

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

    code = "bad_request"
    status = 400


class MalformedFrame(BadInput):
    """The body is not a safetensors stream, or not a complete one."""

    code = "malformed_frame"


class BadHeader(BadInput):
    """A `gradpost-` request header is missing or not what it should be."""

    code = "bad_header"


class UnsupportedProtocol(BadInput):
    """The other side speaks another version of the protocol."""

    code = "unsupported_protocol"


class BodyTooLarge(BadInput):
    """The body, the frame's header or its number of tensors is above the limit."""

    code = "body_too_large"
    status = 413


class LengthRequired(BadInput):
    """A tensor body needs a Content-Length, so that it is capped before anything is allocated."""

    code = "length_required"
    status = 411


class UnsupportedTransferCoding(BadInput):
    """The service reads bodies that are chunked or have a length, and no other transfer coding."""

    code = "unsupported_transfer_coding"
    status = 501


class UnsupportedContentCoding(BadInput):
    """The service does not decompress the bodies of requests."""

    code = "unsupported_content_coding"
    status = 415


class InvalidMessage(BadInput):
    """A control message does not fit its schema."""

    code = "invalid_message"
    status = 422


class UnknownBlock(BadInput):
    """The block is not in the plan, or lives on another pserver."""

    code = "unknown_block"
    status = 422


class WrongShape(BadInput):
    """The block's shape is not the plan's."""

    code = "wrong_shape"
    status = 422


class WrongDtype(BadInput):
    """The block's dtype is not the plan's."""

    code = "wrong_dtype"
    status = 422


class NonFiniteGradient(BadInput):
    """A gradient holds NaN or infinity and the policy is `reject`."""

    code = "non_finite_gradient"
    status = 422


class GradientChanged(BadInput):
    """With `overlap`, a gradient was changed after it had left; raised by a trainer in its own script."""

    code = "gradient_changed"
    status = 422


class BadModel(BadInput):
    """The list of parameters cannot be planned."""

    code = "bad_model"
    status = 422


class UnsupportedOptimizer(BadInput):
    """The optimizer is not on the list of element-wise ones, or its flags are not."""

    code = "unsupported_optimizer"
    status = 422


class BadHyperParameters(BadInput):
    """The numbers of a push do not fit the run's optimizer."""

    code = "bad_hyper_parameters"
    status = 422


class NotFound(BadInput):
    """There is no such path, parameter or member."""

    code = "not_found"
    status = 404


class MethodNotAllowed(BadInput):
    """The path is there, the method is not."""

    code = "method_not_allowed"
    status = 405


class Unauthenticated(BadInput):
    """The request carries no bearer token, or none that the service knows."""

    code = "unauthenticated"
    status = 401


class Forbidden(BadInput):
    """The token's scope does not cover the request; `needed` and `given` say which."""

    code = "forbidden"
    status = 403


class BadHost(BadInput):
    """The request was made for a host name that the service does not go by."""

    code = "bad_host"
    status = 421


class BadOrigin(BadInput):
    """A page of another site made a browser send the request."""

    code = "bad_origin"
    status = 403


class Conflict(GradpostError):
    """The request is stale or at odds with the run."""

    code = "conflict"
    status = 409


class StaleRun(Conflict):
    """The request belongs to another run or attempt."""

    code = "stale_run"


class PlanMismatch(Conflict):
    """The request was made for another slice plan."""

    code = "plan_mismatch"


class StalePserver(Conflict):
    """The request was meant for another pserver, or for another life of this one."""

    code = "stale_pserver"


class StaleTrainer(Conflict):
    """The trainer is no member, or this is not its current life."""

    code = "stale_trainer"


class StaleRound(Conflict):
    """The round is over and its parameters have been overwritten."""

    code = "stale_round"


class CannotEvict(Conflict):
    """Without this trainer the run could not go on."""

    code = "cannot_evict"


class FutureRound(Conflict):
    """The round is not open yet."""

    code = "future_round"


class NormChanged(Conflict):
    """The round's gradient here is not the one of the global norm that the get brought: ask for the norms again."""

    code = "norm_changed"


class DelayExceeded(Conflict):
    """The gradient was computed on parameters older than `max_delay` allows."""

    code = "delay_exceeded"


class RolledBack(Conflict):
    """The run went back to an earlier round, `round`: what was under way is lost, and training goes on after it."""

    code = "rolled_back"


class ContributionConflict(Conflict):
    """The same identity came with other bytes."""

    code = "contribution_conflict"


class ContributionMissing(Conflict):
    """A batch barrier came before this pserver had the trainer's whole contribution; push it again."""

    code = "contribution_missing"


class RankTaken(Conflict):
    """A living trainer has this rank."""

    code = "rank_taken"
    may_be_retried = True  # its lease may end


class IndexTaken(Conflict):
    """A living pserver has this index."""

    code = "index_taken"
    may_be_retried = True  # its lease may end


class WorldMismatch(Conflict):
    """The trainer's WORLD_SIZE or rank does not fit the cluster."""

    code = "world_mismatch"


class ModeMismatch(Conflict):
    """The trainer was started for another mode than the cluster runs."""

    code = "mode_mismatch"


class NoPservers(Conflict):
    """With `strategy` ring there are no pservers, and so nothing that only they have or do."""

    code = "no_pservers"


class ModelMismatch(Conflict):
    """The trainer's model is not the one that the run's other trainers declared."""

    code = "model_mismatch"


class TryAgain(GradpostError):
    """Nothing is wrong; the same request again may succeed."""

    code = "try_again"
    status = 503
    may_be_retried = True


class NotReady(TryAgain):
    """The service has no run, or not all initial values; `waiting_for` says what is missing."""

    code = "not_ready"


class RoundPending(TryAgain):
    """The barrier is not complete; `missing` names the trainers that it waits for."""

    code = "round_pending"


class QueueFull(TryAgain):
    """A block's queue has no room; `blocks` names some of those that are full."""

    code = "queue_full"


class Overloaded(TryAgain):
    """The service has as many requests, or bytes of bodies, as it may take at once; `Retry-After` says when again."""

    code = "overloaded"


class SlowBody(TryAgain):
    """The body did not come in the time that it may take; what had come of it was dropped."""

    code = "slow_body"
    status = 408


class Ended(GradpostError):
    """What the caller waits for will not come."""

    code = "ended"
    status = 410


class TrainerLost(Ended):
    """A trainer's lease ran out or it failed, and the run cannot go on without it."""

    code = "trainer_lost"


class TrainerLeft(Ended):
    """A trainer of a ring has left, being done, and the others cannot go on without it."""

    code = "trainer_left"


class RingBroken(Ended):
    """The ring's connections broke, and nobody was lost as far as the coordinator knows. Raised by trainers only."""

    code = "ring_broken"
    status = 504


class HostBroken(Ended):
    """Another process of the trainer's host has ended, failed or gone silent. Raised by trainers only."""

    code = "host_broken"
    status = 504


class PserverLost(Ended):
    """A pserver's lease ran out, and with it a shard of the model."""

    code = "pserver_lost"


class RoundTimeout(Ended):
    """A trainer is alive but did not reach the barrier in time."""

    code = "round_timeout"
    status = 504


class RunOver(Ended):
    """All trainers have left; the run is finished."""

    code = "run_over"


class ApplyFailed(Ended):
    """The optimizer failed on a pserver; its shard is in an unknown state."""

    code = "apply_failed"
    status = 500


class StorageFailed(Ended):
    """A disk does not take what `durability` demands."""

    code = "storage_failed"
    status = 507


class Unreachable(Ended):
    """A service did not answer for the whole retry time. Raised by the client, never sent."""

    code = "unreachable"
    status = 504


def _tree(cls: type[GradpostError]) -> Iterator[type[GradpostError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _tree(child)


ERRORS: Mapping[str, type[GradpostError]] = {cls.code: cls for cls in _tree(GradpostError)}

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

    An unknown code (of a newer server) becomes the fact `unknown_code` of a base class that may be retried or not,
    as the document says.

    >>> error_from_problem({"code": "stale_round", "detail": "round 3 is over", "current": 5}).facts
    {'current': 5}
    """
    if not isinstance(problem, Mapping):
        raise ValueError(f"not a problem document: {problem!r}")
    code = str(problem.get("code"))
    facts = {str(key): value for key, value in problem.items() if key not in _DOCUMENT_MEMBERS}
    cls = ERRORS.get(code)
    if cls is None:
        cls = TryAgain if problem.get("may_be_retried") is True else GradpostError
        facts["unknown_code"] = code
    return cls(str(problem.get("detail") or problem.get("title") or "no detail was given"), **facts)
