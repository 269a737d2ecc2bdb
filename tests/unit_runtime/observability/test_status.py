"""Facts, liveness and readiness, and what the port answers over real HTTP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
from fakes.run_folder import synthetic_row
from prometheus_client.parser import text_string_to_metric_families

from orbit_runtime.errors import OutputError
from orbit_runtime.observability.metrics import RunMetrics, build_row
from orbit_runtime.observability.server import BIND_VARIABLE, HTTPServer, start_server
from orbit_runtime.observability.status import LiveStatus
from orbit_runtime.workers.child.heartbeat import STALL_SECONDS


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_step_becomes_the_facts_of_the_run() -> None:
    status = LiveStatus("quickstart", total=60)
    status.observe(synthetic_row(10))
    facts = status.snapshot()
    assert (facts["step"], facts["total"], facts["policy_version"]) == (10, 60, 10)
    assert facts["adapter_digest"] == f"tree:{10:064x}"
    assert facts["parity_limit"] == 1e-5
    assert facts["eta_seconds"] == pytest.approx(50 * 0.22, rel=0.1)


def test_an_unknown_fact_is_refused() -> None:
    with pytest.raises(TypeError, match="rewrd"):
        LiveStatus("a").update(rewrd=1)


def test_a_run_that_makes_no_progress_is_not_alive_and_says_where_it_hangs() -> None:
    clock = Clock()
    status = LiveStatus("a", stall_limit_seconds=60, clock=clock)
    status.update(phase="Running", stage="collect")
    clock.now += 59
    assert status.is_live() == (True, None)
    clock.now += 2
    live, reason = status.is_live()
    assert not live
    assert "61 s" in str(reason)
    assert "collect" in str(reason)
    status.beat()
    assert status.is_live()[0]


def test_a_run_may_be_as_silent_as_a_device_and_its_ranks() -> None:
    clock = Clock()
    status = LiveStatus("a", clock=clock)
    clock.now += STALL_SECONDS
    assert status.is_live()[0]
    clock.now += 1
    assert not status.is_live()[0]


def test_a_first_step_of_hours_lives_while_its_stage_shows_signs_of_life() -> None:
    clock, signed = Clock(), [0.0]
    status = LiveStatus("a", clock=clock, silent_seconds=lambda: clock.now - signed[0])
    status.update(stage="collect")
    for _ in range(4):
        clock.now += 1000
        signed[0] = clock.now - 5
        assert status.is_live() == (True, None)
        assert status.snapshot()["seconds_since_progress"] == 5
    clock.now += STALL_SECONDS
    is_live, reason = status.is_live()
    assert not is_live
    assert reason == "no progress for 1805 s (limit 1800 s), stage collect"


def test_prometheus_is_told_the_newest_sign_within_a_step_as_the_health_check_sees_it() -> None:
    clock, signed = Clock(), [-1e9]
    status, metrics = LiveStatus("a", clock=clock, silent_seconds=lambda: clock.now - signed[0]), RunMetrics(run="a")
    name = "orbit_run_last_sign_of_life_timestamp_seconds"
    assert f"{name}{{" not in metrics.render().decode(), "without signs there is no series"
    metrics.follow_signs(status.newest_sign)

    def told() -> float:
        found = {each.name: each for each in text_string_to_metric_families(metrics.render().decode())}
        return found[name].samples[0].value

    assert told() == clock.now, "the start"
    for _ in range(3):
        clock.now += 7200
        signed[0] = clock.now - 4
        assert told() == clock.now - 4
        assert status.is_live()[0]
    clock.now += STALL_SECONDS + 1
    assert told() == signed[0]
    assert not status.is_live()[0]
    status.beat()
    assert told() == clock.now


def test_a_run_whose_steps_are_long_is_given_ten_of_them() -> None:
    clock = Clock()
    status = LiveStatus("a", stall_limit_seconds=60, clock=clock)
    status.observe(build_row(step=1, seconds_total=30.0))
    clock.now += 299
    assert status.is_live()[0]
    clock.now += 2
    assert not status.is_live()[0]


def test_a_run_that_has_ended_stays_alive() -> None:
    clock = Clock()
    status = LiveStatus("a", stall_limit_seconds=1, clock=clock)
    status.update(phase="Done")
    clock.now += 1000
    assert status.is_live()[0]


def test_a_run_is_ready_only_while_it_runs() -> None:
    status = LiveStatus("a")
    assert not status.is_ready()[0]
    status.update(phase="Running")
    assert status.is_ready() == (True, None)
    status.update(phase="Failed")
    assert status.is_ready() == (False, "phase is Failed")


def test_a_reader_never_sees_half_a_step() -> None:
    status = LiveStatus("a", total=10_000)
    torn: list[int] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            facts = status.snapshot()
            if facts["policy_version"] is not None and facts["step"] != facts["policy_version"]:
                torn.append(facts["step"])

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, 400):
        status.observe(build_row(step=step, policy_version=step, seconds_total=0.1))
    stop.set()
    reader.join()
    assert not torn


def test_numbers_that_json_has_no_words_for_are_absent() -> None:
    status = LiveStatus("a")
    status.observe(build_row(step=1, reward_mean=float("nan")))
    assert status.snapshot()["reward"] is None


@pytest.fixture
def served() -> Iterator[tuple[LiveStatus, HTTPServer]]:
    status, metrics = LiveStatus("quickstart", total=60), RunMetrics(run="quickstart")
    metrics.observe(synthetic_row(1))
    server = start_server(status, metrics, 0)
    yield status, server
    server.close()


def test_the_port_answers_status_and_metrics(served: tuple[LiveStatus, HTTPServer]) -> None:
    _, server = served
    assert httpx.get(f"{server.url}/status").json()["run"] == "quickstart"
    answer = httpx.get(f"{server.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert any(family.name == "orbit_run_step" for family in text_string_to_metric_families(answer.text))
    assert httpx.get(f"{server.url}/other").status_code == 404


def test_health_and_readiness_are_200_or_503_with_the_reason(served: tuple[LiveStatus, HTTPServer]) -> None:
    status, server = served
    assert httpx.get(f"{server.url}/healthz").status_code == 200
    answer = httpx.get(f"{server.url}/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"ok": False, "reason": "phase is Starting"}
    status.update(phase="Running")
    assert httpx.get(f"{server.url}/readyz").status_code == 200


def test_a_port_in_use_names_the_field_and_the_way_out(served: tuple[LiveStatus, HTTPServer]) -> None:
    status, server = served
    with pytest.raises(OutputError) as caught:
        start_server(status, RunMetrics(run="b"), server.port)
    assert str(server.port) in caught.value.message
    assert caught.value.where == "spec.observability.metricsPort"
    assert "any free port" in str(caught.value.fix)


def test_a_closed_server_gives_its_port_back() -> None:
    server = start_server(LiveStatus("a"), RunMetrics(run="a"), 0)
    server.close()
    server.close()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", server.port))


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(OutputError, match="cannot listen") as caught:
        start_server(LiveStatus("a"), RunMetrics(run="a"), 0, host="203.0.113.7")
    assert BIND_VARIABLE in str(caught.value.fix)


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_a_pod_is_reached_at_its_address_of_either_kind(has_ipv6: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: has_ipv6)
    monkeypatch.setenv(BIND_VARIABLE, "::")
    server = start_server(LiveStatus("a"), RunMetrics(run="a"), 0)
    asked = ["127.0.0.1", "[::1]"] if has_ipv6 else ["127.0.0.1"]
    for url in (server.url, *(f"http://{host}:{server.port}" for host in asked)):
        assert httpx.get(f"{url}/status").json()["run"] == "a"
    server.close()


def test_it_listens_on_loopback_only_unless_told(served: tuple[LiveStatus, HTTPServer]) -> None:
    assert served[1].host == "127.0.0.1"
