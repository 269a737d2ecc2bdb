"""The page of a run that goes on: served by its port, made by a process of its own, at a bounded cost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fakes.browser import PHONE, Browser, needs_browser
from fakes.run_folder import SyntheticRun, synthetic_row, write_run_folder

from orbit_runtime.observability.live import REST, LiveFolder, LivePage
from orbit_runtime.observability.metrics import RunMetrics
from orbit_runtime.observability.server import HTTPServer, start_server
from orbit_runtime.observability.status import LiveStatus
from orbit_runtime.storage import open_store


class Clock:
    """Each look at it takes as long as a test says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.takes = 0.0

    def __call__(self) -> float:
        self.now += self.takes
        return self.now


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = SyntheticRun(ended=None, compacted=False, prompts=10, group_size=4)
    return write_run_folder(tmp_path_factory.mktemp("run"), made)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[HTTPServer]:
    live = LivePage(str(folder))
    server = start_server(LiveStatus("quickstart", total=60), RunMetrics(run="quickstart"), 0, live=live)
    yield server
    server.close()
    live.close()


def test_the_port_serves_the_page_and_the_rollouts_of_a_step(served: HTTPServer) -> None:
    answer = httpx.get(f"{served.url}/", follow_redirects=True, timeout=60)
    assert answer.url.path == "/report"
    assert "reward, last 12 steps" in answer.text
    assert "connect-src &#39;self&#39;" in answer.text
    found = httpx.get(f"{served.url}/report/rollouts?step=1&from=8", timeout=60).json()
    assert (found["step"], len(found["groups"]), found["next"]) == (1, 2, None)
    assert len(found["groups"][0]["rows"]) == 4


@pytest.mark.parametrize(("query", "code"), [("step=2&from=0", 404), ("step=x", 400), ("step=-1", 400), ("", 400),
                                             ("step=1&from=1e9", 400), ("step=" + "9" * 30, 400)])  # fmt: skip
def test_a_question_that_has_no_answer_is_told_so(served: HTTPServer, query: str, code: int) -> None:
    assert httpx.get(f"{served.url}/report/rollouts?{query}", timeout=60).status_code == code


@pytest.mark.parametrize("path", ["report", "report/rollouts?step=1"])
def test_answers_are_for_readers_on_this_machine_only(served: HTTPServer, path: str) -> None:
    answer = httpx.get(f"{served.url}/{path}", headers={"Host": "rebound.example.com"}, timeout=60)
    assert answer.status_code == 403
    assert "port-forward" in answer.text


def test_a_process_that_was_killed_is_started_again(folder: Path) -> None:
    live = LivePage(str(folder))
    assert json.loads(live.rollouts(60, 0) or b"")["step"] == 60
    process = live._process
    assert process is not None
    process.kill()
    process.wait()
    assert live.rollouts(60, 0) is not None
    live.close()
    live.close()
    assert live._process is None


def test_a_page_is_made_anew_after_ten_times_as_long_as_it_took(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    clock = Clock()
    looked = LiveFolder(open_store(str(tmp_path / "run"), writable=False), clock)
    clock.takes = 2.0
    assert ">60 / 60<" in looked.page()
    (tmp_path / "run/metrics/step-000061.json").write_text(synthetic_row(61).to_json())
    clock.takes = 0.0
    clock.now += 2.0 * REST - 0.1
    assert ">60 / 60<" in looked.page()
    clock.now += 0.2
    assert ">61<" in looked.page()


def test_of_a_run_of_ten_thousand_steps_only_what_is_new_is_read_and_the_page_stays_small(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path, SyntheticRun(steps=3, ended=None))
    lines = "".join(synthetic_row(step, total=10_000).to_json() + "\n" for step in range(1, 10_001))
    (folder / "metrics.jsonl").write_text(lines)
    store, clock, read = open_store(str(folder), writable=False), Clock(), []
    view_many = store.view_many
    store.view_many = lambda keys: read.append(list(keys)) or view_many(keys)  # type: ignore[method-assign]
    looked = LiveFolder(store, clock)
    page = looked.page()
    assert len(page) < 2_000_000
    assert "Steps 1 to 10000" in page
    for step in (10_001, 10_002):
        (folder / f"metrics/step-{step:06d}.json").write_text(synthetic_row(step, total=10_002).to_json())
        clock.now += 1000
        assert f"Steps 1 to {step}" in looked.page()
    assert [len(keys) for keys in read] == [0, 1, 2], "the newest row that is known comes again, complete"


@needs_browser
def test_a_browser_gets_new_steps_and_rollouts_of_old_ones_without_a_reload(tmp_path: Path) -> None:
    run = SyntheticRun(steps=59, ended=None, compacted=False, prompts=10, group_size=4)
    folder = write_run_folder(tmp_path / "run", run)
    live = LivePage(str(folder))
    server = start_server(LiveStatus("quickstart", total=60), RunMetrics(run="quickstart"), 0, live=live)
    try:
        with Browser(tmp_path / "browser") as browser:
            browser.open(f"{server.url}/report", PHONE)
            browser.wait("document.querySelector('#live').textContent === 'live'")
            assert browser.run("document.querySelector('#rollouts select').value") == "59"
            browser.run("window.untouched = document.querySelector('#rollouts')")
            browser.click("#rollouts button[aria-label='step before']")
            browser.wait("document.querySelector('#rollouts').innerText.includes('groups 1 to 8 of 10')")
            assert browser.run("document.querySelector('#rollouts select').value") == "1"
            (folder / "metrics/step-000060.json").write_text(synthetic_row(60).to_json())
            browser.wait(
                "(document.dispatchEvent(new Event('look')), document.querySelector('#live').dataset.step === '60')",
                seconds=60,
            )
            assert browser.run("window.untouched === document.querySelector('#rollouts')"), "what is read stays"
            assert browser.run("document.querySelector('#rollouts select').value") == "1"
            browser.hover("svg[data-points]", 0.999)
            assert "step 60" in browser.wait("document.querySelector('.tip:not([hidden])')?.innerText")
            assert not browser.complaints
            width, height = browser.size()
            assert width == PHONE[0]
            assert height < 9 * PHONE[1]
    finally:
        server.close()
        live.close()
