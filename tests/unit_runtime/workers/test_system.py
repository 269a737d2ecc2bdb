"""This machine and this process: the collector of cycles, held ports, threads that wait asleep."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orbit_runtime.rollout.sglang_server import ServerSettings, server_variables
from orbit_runtime.workers.servers.process import launch_environment
from orbit_runtime.workers.system import VARIABLE, HeldPort, gc_paused, unfreeze_objects, wait_asleep


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    gc.enable()
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()


def num_collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_nothing_is_collected_meanwhile_and_all_at_the_end() -> None:
    with gc_paused():
        before = num_collections()
        lost = weakref.ref(Cycle())
        kept = [Cycle() for _ in range(100_000)]
        assert num_collections() == before
        assert lost() is not None
    assert lost() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(kept)


def test_what_lives_at_the_end_is_collected_after_the_run() -> None:
    with gc_paused():
        kept = Cycle()
    model = weakref.ref(kept)
    del kept
    gc.collect()
    assert model() is not None, "left alone"
    unfreeze_objects()
    gc.collect()
    assert model() is None


def test_the_outer_block_decides_and_so_does_who_switched_it_off() -> None:
    with gc_paused():
        with gc_paused():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() == 0
    assert gc.isenabled()
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


def test_it_is_switched_on_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="no model"), gc_paused():
        raise ValueError("no model")
    assert gc.isenabled()


IP_LOCAL_PORT_RANGE = 51
"""Of Linux 6.3, which Python does not name: the ports that this socket may be given."""


def test_a_server_listens_on_it_while_it_is_held_and_answers_after_it_was_let_go() -> None:
    async def talk() -> bytes:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"here")
            writer.close()

        with HeldPort() as port:
            server = await asyncio.start_server(answer, "127.0.0.1", port)
        async with server:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            said = await reader.read()
            writer.close()
        return said

    assert asyncio.run(talk()) == b"here"


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_nobody_who_asks_for_any_port_is_given_it(address: str, reuses: bool) -> None:
    if sys.platform != "linux":
        pytest.skip("a socket's range of ports can be narrowed on Linux only")
    with HeldPort() as port, socket.socket() as other:
        if reuses:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port | port << 16))
        except OSError:
            pytest.skip("this kernel is older than 6.3: a socket's range of ports cannot be narrowed")
        with pytest.raises(OSError, match="Address already in use") as caught:
            other.bind((address, 0))
        assert caught.value.errno == errno.EADDRINUSE


def test_two_ports_that_are_held_differ_and_one_that_was_let_go_can_be_had() -> None:
    first, second = HeldPort(), HeldPort()
    assert first.number != second.number
    first.close()
    first.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", first.number))
    second.close()


SETTINGS = ServerSettings(
    model=Path("base"), device="cpu", dtype="float32", targets=("q_proj",), max_running_requests=1,
    max_sequence_length=8, seed=0,
)  # fmt: skip


def test_what_the_user_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {VARIABLE: "ACTIVE"}
    wait_asleep(environment)
    assert environment == {VARIABLE: "ACTIVE"}
    monkeypatch.setenv(VARIABLE, "ACTIVE")
    assert launch_environment(server_variables(SETTINGS, Path("taps")))[VARIABLE] == "ACTIVE"


def test_a_server_on_a_cpu_waits_asleep_and_one_on_a_gpu_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert server_variables(SETTINGS, Path("taps"))[VARIABLE] == "PASSIVE"
    assert VARIABLE not in server_variables(replace(SETTINGS, device="cuda"), Path("taps"))


def test_torch_is_not_there_yet_when_orbit_run_decides_how_threads_wait() -> None:
    """OpenMP reads it once, when it is loaded."""
    code = (
        "import sys, orbit_runtime.cli.run, orbit_runtime.cli.plan, orbit_runtime.spec, orbit_runtime.workers.system\n"
        "sys.exit('torch' in sys.modules)"
    )
    path = os.pathsep.join(each for each in sys.path if each)
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == 0
