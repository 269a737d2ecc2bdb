"""The API server refuses an attempt: the run says so, and whatever passes by itself stays a retry."""

from __future__ import annotations

import pytest

pytest.importorskip("kopf", reason="the operator's packages are not installed (extra `operator`)")

from orbit_operator.actions import Action, CreateAttempt, DeletePod, State
from orbit_operator.api import ApiError
from orbit_operator.apply import NameTakenError, explain_refusal

STATE = State("Pending", "PodPending")
QUOTA = 'jobs.batch "a-a1" is forbidden: exceeded quota: none, requested: count/jobs.batch=1'


@pytest.mark.parametrize(
    ("error", "reason", "owner"),
    [
        (ApiError(403, "Forbidden", QUOTA), "QuotaExceeded", "cluster"),
        (ApiError(403, "Forbidden", "cannot create resource"), "AttemptRefused", "cluster"),
        (ApiError(422, "Invalid", "spec.template"), "AttemptRefused", "cluster"),
        (ApiError(400, "BadRequest", "denied by a policy"), "AttemptRefused", "cluster"),
        (NameTakenError("Job a-a1 exists and is not this run's"), "NameTaken", "user"),
    ],
)
def test_a_refusal_that_lasts_is_told(error: ApiError | NameTakenError, reason: str, owner: str) -> None:
    told = explain_refusal(CreateAttempt(1), error, STATE)
    assert told is not None
    assert (told.phase, told.reason, told.owner) == ("Pending", reason, owner)
    assert str(getattr(error, "message", error)) in told.message


@pytest.mark.parametrize(
    ("action", "status"),
    [(CreateAttempt(1), status) for status in (0, 409, 429, 500, 503)] + [(DeletePod("p", "u"), 403)],
)
def test_one_that_passes_or_concerns_something_else_is_not(action: Action, status: int) -> None:
    assert explain_refusal(action, ApiError(status, "", ""), STATE) is None
