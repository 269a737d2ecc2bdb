"""Groups of real ranks: Ray's actors that meet by gloo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orbit_runtime.errors import InternalError, OutputError
from orbit_runtime.workers.ranks.group import GroupSettings, start_ranks
from orbit_runtime.workers.ranks.node import check_ports, port_block

pytestmark = [pytest.mark.usefixtures("marked"), pytest.mark.timeout(240)]
TARGET = "ranks.targets:Meeting"


def some_ports() -> tuple[int, int]:
    """Below those that the system hands out by itself, as any of this machine's processes may be given one of them."""
    ports, lock = port_block(3)
    os.close(lock)
    return ports


def test_ranks_meet_answer_in_order_and_leave_nothing(tmp_path: Path) -> None:
    ports = some_ports()
    group = GroupSettings(TARGET, {"factor": 2}, 3, environment={"ORBIT_TEST_COLOUR": "green"}, ports=ports)
    with start_ranks(group, tmp_path) as ranks:
        assert ranks.call("add", 5.0) == [30.0, 30.0, 30.0]
        assert ranks.call("weigh", b"x" * (1 << 24)) == [(rank, 1 << 24) for rank in range(3)]
        assert len(set(ranks.call("pid")) | {os.getpid()}) == 4
        assert ranks.call("see", "ORBIT_TEST_COLOUR", "LOCAL_RANK") == [["green", "0"]] * 3
        with pytest.raises(OutputError, match=f"range {ports[0]}-{ports[1]}"):
            check_ports(ports)
    check_ports(ports)
    for rank in range(3):
        assert f"rank {rank} of 3 has met the others" in (tmp_path / f"rank-{rank}.log").read_text()
    with pytest.raises(InternalError, match="closed"):
        ranks.call("pid")
    ranks.close()


def test_only_ranks_import_what_they_are_made_with_and_only_with_their_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads threads and devices when it is imported, and the driver of Ray needs no torch."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    from ranks.targets import Unpacked

    group = GroupSettings(
        "ranks.targets:Keeping", {"given": Unpacked()}, 2, environment={"ORBIT_TEST_COLOUR": "green"}, rendezvous=False
    )
    with start_ranks(group, tmp_path) as ranks:
        told = ranks.call("tell")
    assert [(pid, colour) for pid, colour, _ in told] == [(own, "green") for _, _, own in told]
    assert len({own for _, _, own in told} | {os.getpid()}) == 3


def test_each_rank_sees_its_own_gpu_alone_and_no_process_listens_to_the_network(tmp_path: Path, marked) -> None:
    with start_ranks(GroupSettings(TARGET, {}, 2, devices=("5", "3")), tmp_path) as ranks:
        assert ranks.call("see", "CUDA_VISIBLE_DEVICES") == [["5"], ["3"]]
        assert foreign_listeners(set(marked())) == []


def foreign_listeners(pids: set[int]) -> list[str]:
    """Addresses besides the loopback device at which these processes listen, from proc_net(5)."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            name = os.readlink(link) if link.is_symlink() else ""
            if name.startswith("socket:["):
                inodes.add(name[8:-1])
    local = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            address, state, inode = fields[1].split(":")[0], fields[3], fields[9]
            if state == "0A" and inode in inodes and address not in local:
                found.append(fields[1])
    return found


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OutputError, match=f"port {port} of the ranks' range") as caught:
            start_ranks(GroupSettings(TARGET, {}, 1, ports=(port - 10, port + 30)), tmp_path)
    assert caught.value.exit_code == 73
    assert caught.value.fix


def test_a_target_that_fails_to_be_made_ends_the_group_with_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match=r"rank 0 \(CPU\) in stage start: TypeError: .*no_such_argument") as caught:
        start_ranks(GroupSettings(TARGET, {"no_such_argument": 1}, 1), tmp_path)
    assert caught.value.exit_code == 70
    assert "Traceback" in str(caught.value.__cause__)
