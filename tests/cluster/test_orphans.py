"""Servers end with the tests that started them, however those end. What else a bed leaves: `test_leftovers`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster.bed.cleanup import has_ended
from cluster.bed.cluster import wait_for
from cluster.bed.programs import find_program

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from cluster.bed.control_plane import ControlPlane
from cluster.bed.processes import Processes
from cluster.by_hand import Team, connect
from cluster.operator_process import Operator
folder = Path(sys.argv[1])
plane = ControlPlane(Processes(folder / "logs"), folder)
plane.start()
operator = Operator(Team(connect(plane.kubeconfig), "default"), folder / "operator.log")
print(operator.process.pid, *(process.pid for process in plane.processes.running.values()), flush=True)
time.sleep(600)
"""


def test_a_control_plane_and_an_operator_whose_tests_are_killed_end_with_them(tmp_path: Path) -> None:
    find_program("kube-apiserver")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
    program = [sys.executable, "-c", HOLD, str(tmp_path)]
    holder = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True)
    pids: list[int] = []
    try:
        assert holder.stdout is not None
        pids += map(int, holder.stdout.readline().split())
        assert len(pids) == 4, "operator, etcd, API server, controllers"
        assert not any(map(has_ended, pids))
        holder.kill()
        wait_for(lambda: all(map(has_ended, pids)), "all have ended", 60)
    finally:
        holder.kill()
        holder.wait()
        for pid in pids:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)
