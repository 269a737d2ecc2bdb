"""A run that lies in a store, served: its newest policy, and others of it while it serves."""

from __future__ import annotations

import httpx
import pytest

from orbit_runtime.loop import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.serve.open import ServeRequest, open_models
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.serve.server import start_serving
from orbit_runtime.spec import OrbitRun
from tests.integration.killing import small_manifest

pytestmark = pytest.mark.timeout(600)


def test_a_policy_is_loaded_from_the_store_and_proven(s3_bucket: str) -> None:
    place = f"{s3_bucket}/run"
    run(OrbitRun.model_validate(small_manifest(steps=2)), out=place, progress=SilentProgress())
    serving = start_serving(open_models(ServeRequest(place), ServeLimits(), lambda _: None), "127.0.0.1", 0, None)
    try:
        with httpx.Client(base_url=serving.url, timeout=60) as client:
            newest = client.get("/v1/models/policy").json()
            assert newest["policy_version"] == 2
            found = client.post("/update_weights", json={"adapter": f"{place}/adapters/policy-v1"})
            assert found.status_code == 200, found.text
            assert (found.json()["policy_version"], found.json()["proof"]["verdict"]) == (1, "proven")
            assert found.json()["digest"] != newest["digest"]
            for elsewhere in (f"{s3_bucket}/run-of-others", f"{place}/../other"):
                assert client.post("/update_weights", json={"adapter": elsewhere}).status_code == 403
            absent = client.post("/update_weights", json={"adapter": f"{place}/adapters/policy-v9"})
            assert absent.status_code == 422
            assert client.get("/v1/models/policy").json()["policy_version"] == 1
    finally:
        serving.close()
