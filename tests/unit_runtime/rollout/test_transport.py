"""Both ways that are no files, sent and received by the real code: what arrives is what was published, or it is said.

Members of a broadcast are threads here; with SGLang's own processes, killed ones among them, it is in `tests/engines`.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from orbit_runtime.adapters.files import adapter_bytes, files_digest
from orbit_runtime.adapters.group import BroadcastGroup, join
from orbit_runtime.adapters.ticket import (
    NotArrivedError,
    Ticket,
    as_tensor,
    blocks,
    read_ticket,
    split_carried,
    with_config,
)
from orbit_runtime.digests import hash_pieces
from orbit_runtime.errors import GateError, ModelError
from orbit_runtime.rollout.transport import EXPLAIN_FILE, Broadcast, FolderDesk, SharedMemory, Transport
from orbit_runtime.sglang_plugin.arrival import files_of, receive
from orbit_runtime.storage import Part, StoredFiles, open_store
from orbit_runtime.types import AdapterFiles

ALONE = {"replica 0": (0, 1)}
PAIR = {"replica 0": (0, 1), "replica 1": (0, 1)}


def adapter(seed: int) -> AdapterFiles:
    files = {
        name: random.Random(f"{seed} {name}").randbytes(1000 + seed)
        for name in ("rotations.safetensors", "adapter_config.json", "adapter_model.safetensors")
    }
    return AdapterFiles(seed, files, files_digest(files))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.fixture(params=["SharedMemory", "Broadcast"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    made: Transport = SharedMemory() if request.param == "SharedMemory" else Broadcast(seconds=5)
    yield made
    made.close()


def ticket_of(folder: Path) -> Ticket:
    found = read_ticket(folder)
    assert found is not None
    return found


def fetch(folder: Path, group: BroadcastGroup | None = None) -> tuple[dict[str, bytes], BroadcastGroup]:
    """As one of several members does, of which one process has room for one only."""
    ticket = ticket_of(folder)
    group = group or join(ticket.source)
    data = torch.empty(ticket.num_bytes, dtype=torch.uint8)
    files = split_carried(ticket, data.numpy())
    for block in (block for file in files.values() for block in blocks(file)):
        group.broadcast(as_tensor(block))
    return with_config(ticket, folder, files), group


def test_what_arrives_are_the_published_files_publish_after_publish(
    transport: Transport, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    for seed in (1, 2, 3):
        published, folder = adapter(seed), tmp_path / f"v{seed}"
        with transport.carry(published, folder, ALONE):
            assert pool.submit(files_of, folder).result(20) == dict(published.files)
        assert sorted(each.name for each in folder.iterdir()) == ["adapter_config.json", "transport.json"]


def test_a_folder_without_a_ticket_holds_the_files_themselves(tmp_path: Path) -> None:
    published = adapter(1)
    for name, content in published.files.items():
        (tmp_path / name).write_bytes(content)
    assert files_of(tmp_path) == dict(published.files)


def test_nobody_can_write_to_memory_that_was_published(tmp_path: Path) -> None:
    published = adapter(1)
    with SharedMemory().carry(published, tmp_path / "v1", ALONE):
        path = ticket_of(tmp_path / "v1").source["path"]
        with open(path, "r+b", buffering=0) as file, pytest.raises(PermissionError):
            file.write(b"x")
        with open(path, "r+b") as file, pytest.raises(PermissionError):
            mmap.mmap(file.fileno(), 0)
        with open(path, "r+b") as file, pytest.raises(PermissionError):
            file.truncate(5)
        # A receiver may change its own view, which is nobody else's.
        mine = files_of(tmp_path / "v1")["rotations.safetensors"]
        assert files_of(tmp_path / "v1") == dict(published.files), mine


def test_an_adapter_is_nowhere_once_its_publish_has_ended(
    transport: Transport, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """An engine that loads a name again by itself finds the ticket, and nothing behind it."""
    folder = tmp_path / "v1"
    with transport.carry(adapter(1), folder, ALONE):
        ticket = ticket_of(folder)
        pool.submit(receive, ticket, folder).result(20)
    with (tmp_path / "other").open("wb") as other:
        # The descriptor's number may be another file's by now.
        other.write(b"x" * ticket.num_bytes)
        begun = time.monotonic()
        with pytest.raises(NotArrivedError, match="the adapter did not arrive"):
            pool.submit(receive, ticket, folder).result(20)
    assert time.monotonic() - begun < 3
    # The group is as good as before.
    with transport.carry(adapter(2), tmp_path / "v2", ALONE):
        assert pool.submit(files_of, tmp_path / "v2").result(20) == dict(adapter(2).files)
    assert ticket_of(tmp_path / "v2").source.get("generation") == ticket.source.get("generation")


def named_memory(size: int) -> list[str]:
    """Files of about this size; other processes make theirs at any time."""
    found = []
    for each in Path("/dev/shm").iterdir():
        with suppress(FileNotFoundError):
            found += [each.name] if size <= each.stat().st_size <= size + 4096 else []
    return found


def test_shared_memory_has_no_name_and_ends_with_a_killed_run(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from orbit_runtime.rollout.transport import SharedMemory\n"
        "from orbit_runtime.types import AdapterFiles\n"
        "files = {'adapter_config.json': b'{}', 'adapter_model.safetensors': b'x' * 5_000_003}\n"
        "with SharedMemory().carry(AdapterFiles(1, files, 'sha256:ab'), Path(sys.argv[1]), {'a': (0, 1)}):\n"
        "    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "v1")], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    path = ticket_of(tmp_path / "v1").source["path"]
    assert os.path.exists(path)
    assert not named_memory(5_000_003)
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    assert not os.path.exists(path)
    assert not named_memory(5_000_003)


# --- broadcast ---


def test_all_processes_of_all_copies_get_it_in_one_group_that_stays(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    transport, groups = Broadcast(seconds=10), [None, None, None]
    generations = set()
    for seed in (1, 2):
        published, folder = adapter(seed), tmp_path / f"v{seed}"
        with transport.carry(published, folder, {"replica 0": (0, 2), "replica 1": (0, 1)}):
            generations.add(ticket_of(folder).source["generation"])
            found = [each.result(20) for each in [pool.submit(fetch, folder, group) for group in groups]]
        assert [files for files, _ in found] == [dict(published.files)] * 3
        groups = [group for _, group in found]
    assert len(generations) == 1
    transport.close()


def test_a_larger_adapter_is_waited_for_longer_in_a_group_of_its_own(tmp_path: Path) -> None:
    transport, seen = Broadcast(seconds=0.2), []
    large = AdapterFiles(1, {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(20 << 20)}, "tree:0")
    for number, published in enumerate((adapter(1), large)):
        with transport.carry(published, tmp_path / str(number), ALONE):
            seen.append(ticket_of(tmp_path / str(number)).source["seconds"])
    assert seen == pytest.approx([0.2, 0.6])
    transport.close()


def test_a_copy_that_was_restarted_and_a_failure_begin_another_generation(tmp_path: Path) -> None:
    transport, seen = Broadcast(seconds=0.2), []
    for number, copies in enumerate((PAIR, PAIR, PAIR | {"replica 1": (1, 1)}, ALONE)):
        folder = tmp_path / str(number)
        # Nobody comes: it ends with its time.
        with transport.carry(adapter(1), folder, copies) as handover:
            assert handover is not None
            seen.append(ticket_of(folder).source)
    assert len({each["generation"] for each in seen}) == 4
    assert [each["size"] for each in seen] == [3, 3, 3, 2]
    transport.close()


def test_it_listens_at_its_own_address_only(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    transport, published = Broadcast(host="127.0.0.2", seconds=10), adapter(1)
    with transport.carry(published, tmp_path / "v1", ALONE):
        port = ticket_of(tmp_path / "v1").source["port"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        assert pool.submit(files_of, tmp_path / "v1").result(20) == dict(published.files)
        # The member's sockets are among them: it listens at the address by which it reached the trainer.
        listening = {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"}
        assert "127.0.0.2" in listening
        assert all(address.startswith("127.") for address in listening), listening
    transport.close()


def test_whoever_waits_for_a_copy_that_does_not_come_is_told_at_once(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    transport, folder = Broadcast(seconds=60), tmp_path / "v1"
    begun = time.monotonic()
    with transport.carry(adapter(1), folder, PAIR) as handover:
        assert handover is not None
        assert [handover.take("replica 0"), handover.take("replica 1"), handover.take("replica 1")] == [
            True,
            True,
            False,
        ]
        waiting: Future[dict[str, bytes]] = pool.submit(files_of, folder)
        time.sleep(0.5)
        assert not waiting.done()
        handover.end()
        with pytest.raises(NotArrivedError, match="is over"):
            waiting.result(20)
    assert time.monotonic() - begun < 20
    transport.close()


def test_one_that_joins_too_much_is_refused(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    transport, published, folder = Broadcast(seconds=10), adapter(1), tmp_path / "v1"
    with transport.carry(published, folder, ALONE):
        assert pool.submit(fetch, folder).result(20)[0] == dict(published.files)
        with pytest.raises(NotArrivedError, match="all 2 places"):
            join(ticket_of(folder).source)
    transport.close()


def test_where_no_copy_lives_nobody_is_waited_for(tmp_path: Path) -> None:
    with Broadcast().carry(adapter(1), tmp_path / "v1", {}) as handover:
        assert handover is None


def test_files_that_are_not_as_long_as_was_published_are_refused_by_name(tmp_path: Path) -> None:
    """Their bytes are proven where they stand, in the slots: `tests/engines/test_transports.py`."""
    published, folder = adapter(1), tmp_path / "v1"
    with SharedMemory().carry(published, folder, ALONE):
        ticket = ticket_of(folder)
        places = {**ticket.source["places"], "rotations.safetensors": [4096, 5000]}
        longer = replace(ticket, source={**ticket.source, "places": places})
        with pytest.raises(ModelError, match="bytes arrived by SharedMemory, 1001 were published") as told:
            receive(longer, folder)
        assert told.value.where == "rotations.safetensors"
        (folder / "adapter_config.json").write_bytes(b"{}")
        with pytest.raises(ModelError, match="2 bytes arrived by SharedMemory, 1001 were published") as told:
            files_of(folder)
        assert told.value.where == "adapter_config.json"


def test_an_adapter_larger_than_dev_shm_goes_through_memory(tmp_path: Path) -> None:
    """As in a container, whose /dev/shm has 64 MB by default, whatever memory it may use."""
    code = (
        "import subprocess, sys\nfrom pathlib import Path\n"
        "subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', '/dev/shm'], check=True)\n"
        "from orbit_runtime.adapters.files import files_digest\n"
        "from orbit_runtime.rollout.transport import SharedMemory\n"
        "from orbit_runtime.sglang_plugin.arrival import files_of\n"
        "from orbit_runtime.types import AdapterFiles\n"
        "files = {'adapter_config.json': b'{}', 'adapter_model.safetensors': bytes(range(256)) * 20_000}\n"
        "try:\n    Path('/dev/shm/a').write_bytes(files['adapter_model.safetensors'])\n"
        "except OSError as error:\n    print(error.strerror)\n"
        "with SharedMemory().carry(AdapterFiles(1, files, files_digest(files)), Path(sys.argv[1]), {'a': (0, 1)}):\n"
        "    print(files_of(Path(sys.argv[1])) == files)\n"
    )
    alone = ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*alone, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs of its own")
    run = subprocess.run(
        [*alone, sys.executable, "-c", code, str(tmp_path / "v1")], capture_output=True, text=True, timeout=120
    )
    assert (run.stdout, run.returncode) == ("No space left on device\nTrue\n", 0), run.stderr


FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(200))}


def stored(folder: Path) -> AdapterFiles:
    store, pieces = open_store(str(folder)), {name: hash_pieces([data]) for name, data in FILES.items()}
    for name, data in FILES.items():
        store.put(f"adapters/policy-v1/{name}", data)
    parts = {name: Part(f"adapters/policy-v1/{name}", each) for name, each in pieces.items()}
    return AdapterFiles(1, StoredFiles(store, parts), "tree:1", pieces)


def read(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def test_files_are_written_once_a_server_asks_and_are_gone_when_it_is_dropped(tmp_path: Path) -> None:
    desk = FolderDesk(tmp_path / "desk")
    desk.take("policy-v1", AdapterFiles(1, FILES, "tree:1"))
    assert read(desk.home("policy-v1")) == {}
    folder = desk.files("policy-v1")
    assert read(folder) == FILES
    assert desk.files("policy-v1") == folder
    with desk.explaining("policy-v1") as places:
        assert list(places) == [folder]
        assert read(folder) == {**FILES, EXPLAIN_FILE: b""}
    assert read(folder) == FILES
    with desk.carry("policy-v1", {}) as handover:
        assert handover is None
    desk.drop("policy-v1")
    assert not folder.exists()
    assert desk.names() == ()


def test_a_file_that_was_changed_in_the_store_is_not_handed_over(tmp_path: Path) -> None:
    adapter, desk = stored(tmp_path / "run"), FolderDesk(tmp_path / "desk")
    assert adapter_bytes(adapter) == sum(map(len, FILES.values()))
    desk.take("policy-v1", adapter)
    key = "adapters/policy-v1/adapter_model.safetensors"
    open_store(str(tmp_path / "run")).put(key, bytes(200))
    with pytest.raises(GateError, match=f"{key} is not what the trainer wrote there"):
        desk.files("policy-v1")
    open_store(str(tmp_path / "run")).put(key, FILES["adapter_model.safetensors"])
    assert read(desk.files("policy-v1")) == FILES
