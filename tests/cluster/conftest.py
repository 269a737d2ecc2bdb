"""A control plane, and a whole cluster, once for all tests of this folder. How they are started: `cluster.bed`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
from cluster.bed.cluster import Cluster, run_cluster
from cluster.bed.control_plane import ControlPlane
from cluster.bed.images import TARGETS, build_ahead, build_product_image
from cluster.bed.processes import Processes
from cluster.bed.programs import find_program
from cluster.fault_stories import Stories, run_stories
from cluster.real_story import RealStory, run_real_story
from cluster.shell import Shell

from tests.cluster.crd_api import RunsApi

BEDS_OF_THEIR_OWN = ("test_leftovers.py", "test_images.py")
"""They start or build what two processes cannot start or build at once."""


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """API server and controllers on a loopback port; no scheduler and no node. Needs no root."""
    find_program("kube-apiserver")
    folder = tmp_path_factory.mktemp("control-plane")
    processes = Processes(folder / "logs")
    plane = ControlPlane(processes, folder)
    try:
        plane.start()
        yield plane
    finally:
        processes.stop_all()


@pytest.fixture(scope="session")
def shared_runs_api(control_plane: ControlPlane) -> Iterator[RunsApi]:
    """The control plane with the CRD installed."""
    with control_plane.client() as client:
        api = RunsApi(client)
        api.install()
        yield api


@pytest.fixture
def runs_api(shared_runs_api: RunsApi) -> RunsApi:
    """The same, without any run."""
    shared_runs_api.delete_all()
    return shared_runs_api


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with eight GPUs each, one without, DNS, Service addresses and an object store. Needs root."""
    find_program("kubelet")
    with run_cluster(tmp_path_factory.mktemp("cluster-logs")) as running:
        yield running


@pytest.fixture(scope="session")
def release(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """The operator, installed by Helm as the guide says: it watches `team-a`. The shell stands in the checkout."""
    for target in TARGETS:
        cluster.import_image(build_product_image(target)[1])
    shell = Shell(cluster, tmp_path_factory.mktemp("shell"))
    shell.follow("install", "Install the chart")
    return shell


@pytest.fixture(scope="session")
def real_story(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealStory]:
    """The runs of `test_node_real_runs`, which ends them."""
    with run_real_story(cluster, tmp_path_factory.mktemp("real-runs") / "operator.log") as running:
        yield running


@pytest.fixture(scope="session")
def fault_stories(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    """The runs of `test_node_faults`, which ends them."""
    with run_stories(cluster, tmp_path_factory.mktemp("node-faults") / "operator.log") as running:
        yield running


@pytest.fixture(scope="session")
def begin(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Starts one of the stories beside a test that mostly waits, if some test looks at that story later."""

    def begin(story: str) -> None:
        if any(story in getattr(item, "fixturenames", ()) for item in request.session.items):
            request.getfixturevalue(story)

    return begin


@pytest.fixture(scope="session")
def real_story_ahead(begin: Callable[[str], None]) -> None:
    """Half of it is waiting: it begins beside the tests that ask for this. It takes all GPUs."""
    begin("real_story")


def pytest_configure() -> None:
    """Whoever ends the tests ends what they started: also as a shell's background job, and by `kill`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The first tests mostly wait: images are built beside them."""
    needs_images = any("release" in getattr(item, "fixturenames", ()) for item in session.items)
    if needs_images and not session.config.option.collectonly:
        build_ahead()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that start a bed of their own come first, the end of the installation last, and then Kueue: no Job is made
    while it starts or ends. Images come before what runs them.

    Whoever asks for the shared bed may wait for its start. Those that use nodes are marked: `tools/test_cluster.sh`
    runs the others beside them.
    """
    order = {"test_leftovers.py": -3, "test_bed.py": -2, "test_images.py": -1, "test_uninstall.py": 1}
    order["test_kueue.py"] = 2
    items.sort(key=lambda item: order.get(item.path.name, 0))
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()) or item.path.name in BEDS_OF_THEIR_OWN:
            item.add_marker(pytest.mark.node)
        if "cluster" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))
