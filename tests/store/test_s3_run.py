"""Whole runs on a real S3 server: five kills, and a server that goes away in mid-run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from fakes.s3_server import S3Server

from orbit_runtime.storage import open_store
from tests.integration.killing import kill_until_done, small_manifest, timeless_rows
from tests.integration.run_launcher import RunLauncher

pytestmark = pytest.mark.timeout(600)
"""Six starts of a run and more: a minute on a quiet machine of two cores."""


@pytest.fixture(scope="module")
def launcher(shared_s3_server: S3Server) -> Iterator[RunLauncher]:
    made = RunLauncher(shared_s3_server.environment())
    yield made
    made.close()


def test_kills_change_no_bit_on_s3(s3_bucket: str, launcher: RunLauncher) -> None:
    manifest = small_manifest(steps=40)
    started = time.monotonic()
    assert launcher.run(manifest, f"{s3_bucket}/alone") == 0
    undisturbed = time.monotonic() - started
    kill_until_done(launcher, manifest, f"{s3_bucket}/killed", kills=5, seed=3, alone=undisturbed)
    alone, killed = open_store(f"{s3_bucket}/alone"), open_store(f"{s3_bucket}/killed")
    assert timeless_rows(killed) == timeless_rows(alone)
    report, expected = (json.loads(store.get("report.json")) for store in (killed, alone))
    assert report["adapter_digest"] == expected["adapter_digest"]
    assert report["executions"] == 6
    assert 2 <= report["resumed"] <= 5, "an execution that saved after another had saved resumed from it"


def test_a_server_that_goes_away_and_comes_back_loses_nothing(own_s3_server: S3Server, launcher: RunLauncher) -> None:
    bucket = own_s3_server.make_bucket("outage")
    manifest = small_manifest(steps=20)
    assert launcher.run(manifest, f"{bucket}/alone", own_s3_server.environment()) == 0
    launcher.start(manifest, f"{bucket}/disturbed", own_s3_server.environment())
    store = open_store(f"{bucket}/disturbed")
    for step in (5, 15):
        deadline = time.monotonic() + 60
        while not store.exists(f"checkpoints/step-{step:06d}/manifest.json") and time.monotonic() < deadline:
            time.sleep(0.02)
        own_s3_server.kill()
        time.sleep(2)
        own_s3_server.start()
    assert launcher.wait() == 0
    assert timeless_rows(store) == timeless_rows(open_store(f"{bucket}/alone"))


def test_a_server_that_stays_away_ends_the_run_with_74_and_it_continues_later(
    own_s3_server: S3Server, launcher: RunLauncher
) -> None:
    bucket = own_s3_server.make_bucket("gone")
    environment = {**own_s3_server.environment(), "ORBIT_STORE_DEADLINE_SECONDS": "3"}
    manifest = small_manifest(steps=15)
    launcher.start(manifest, f"{bucket}/run", environment)
    store = open_store(f"{bucket}/run")
    while not store.exists("checkpoints/step-000004/manifest.json"):
        time.sleep(0.02)
    own_s3_server.kill()
    assert launcher.wait() == 74
    own_s3_server.start()
    assert launcher.run(manifest, f"{bucket}/run", environment) == 0
    assert len(timeless_rows(store)) == 15
