"""What a run reports when the API server refuses to create an attempt's objects.

Belongs here: which refusals last until somebody acts, and their wording. Does not belong here: trying again (`main`).
"""

from __future__ import annotations

from dataclasses import replace

from orbit_operator.actions import Action, CreateAttempt, CreateRanks, State
from orbit_operator.api import ApiError
from orbit_operator.apply import NameTakenError

LASTING = (400, 403, 413, 422)
"""Status codes for a quota, an admission rule, a missing right or an invalid object; others resolve themselves."""


def tell_refusal(action: Action, error: ApiError | NameTakenError, state: State) -> State | None:
    """The state of a run whose attempt cannot be created; `None` if the refusal does not concern the run."""
    match action:
        case CreateAttempt(number):
            what = f"attempt {number}"
        case CreateRanks(number):
            what = f"the RayCluster of attempt {number}"
        case _:
            return None
    if isinstance(error, NameTakenError):
        return replace(state, phase="Pending", reason="NameTaken", message=f"{error}; delete it", owner="user")
    if error.status not in LASTING:
        return None
    reason = "QuotaExceeded" if "exceeded quota" in error.message else "AttemptRefused"
    message = f"{what} cannot be created: {error.message}"[:1024]
    return replace(state, phase="Pending", reason=reason, message=message, owner="cluster")
