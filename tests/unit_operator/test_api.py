"""What the client makes of answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("kopf", reason="the operator's packages are not installed (extra `operator`)")

from orbit_operator.api import PODS, Api, ApiError


class Refusing(Api):
    """Under a server that answers every call with one status."""

    def __init__(self, status: int) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.status = status

    async def call(self, *_: Any, **__: Any) -> Any:
        raise ApiError(self.status, "Refused", "no")


def test_what_is_gone_is_deleted() -> None:
    asyncio.run(Refusing(404).delete(PODS, "team", "pod", "uid"))


@pytest.mark.parametrize("status", [0, 403, 409, 429, 500])
def test_a_deletion_that_was_refused_is_raised_so_that_somebody_looks_again(status: int) -> None:
    """409 too: where it came from two writers at once, the pod still stands, and no event will tell of it."""
    with pytest.raises(ApiError):
        asyncio.run(Refusing(status).delete(PODS, "team", "pod", "uid"))
