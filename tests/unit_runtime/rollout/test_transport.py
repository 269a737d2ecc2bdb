"""The way that is no files, sent and received by the real code: what arrives is what was published, or it is said.

With SGLang's own processes, killed ones among them, it is in `tests/engines`.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from orbit_runtime.adapters.files import adapter_bytes, files_digest
from orbit_runtime.adapters.ticket import NotArrivedError, Ticket, read_ticket
from orbit_runtime.digests import hash_pieces
from orbit_runtime.errors import GateError, ModelError
from orbit_runtime.rollout.transport import EXPLAIN_FILE, FolderMailbox, shared_memory
from orbit_runtime.sglang_plugin.adapter_loading import files_of, receive
from orbit_runtime.storage import Part, StoredFiles, open_store
from orbit_runtime.types import AdapterFiles

ALONE = ("replica 0",)


def adapter(seed: int) -> AdapterFiles:
    files = {
        name: random.Random(f"{seed} {name}").randbytes(1000 + seed)
        for name in ("rotations.safetensors", "adapter_config.json", "adapter_model.safetensors")
    }
    return AdapterFiles(seed, files, files_digest(files))


def ticket_of(folder: Path) -> Ticket:
    found = read_ticket(folder)
    assert found is not None
    return found


def test_what_arrives_are_the_published_files_publish_after_publish(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        published, folder = adapter(seed), tmp_path / f"v{seed}"
        with shared_memory(published, folder, ALONE):
            assert files_of(folder) == dict(published.files)
        assert sorted(each.name for each in folder.iterdir()) == ["adapter_config.json", "transport.json"]


def test_a_folder_without_a_ticket_holds_the_files_themselves(tmp_path: Path) -> None:
    published = adapter(1)
    for name, content in published.files.items():
        (tmp_path / name).write_bytes(content)
    assert files_of(tmp_path) == dict(published.files)


def test_nobody_can_write_to_memory_that_was_published(tmp_path: Path) -> None:
    published = adapter(1)
    with shared_memory(published, tmp_path / "v1", ALONE):
        path = ticket_of(tmp_path / "v1").memory.path
        with open(path, "r+b", buffering=0) as file, pytest.raises(PermissionError):
            file.write(b"x")
        with open(path, "r+b") as file, pytest.raises(PermissionError):
            mmap.mmap(file.fileno(), 0)
        with open(path, "r+b") as file, pytest.raises(PermissionError):
            file.truncate(5)
        # A receiver may change its own view, which is nobody else's.
        mine = files_of(tmp_path / "v1")["rotations.safetensors"]
        assert files_of(tmp_path / "v1") == dict(published.files), mine


def test_an_adapter_is_nowhere_once_its_publish_has_ended(tmp_path: Path) -> None:
    """An engine that loads a name again by itself finds the ticket, and nothing behind it."""
    folder = tmp_path / "v1"
    with shared_memory(adapter(1), folder, ALONE):
        ticket = ticket_of(folder)
        receive(ticket, folder)
    with (tmp_path / "other").open("wb") as other:
        # The descriptor's number may be another file's by now.
        other.write(b"x" * sum(ticket.files.values()))
        begun = time.monotonic()
        with pytest.raises(NotArrivedError, match="the adapter did not arrive"):
            receive(ticket, folder)
    assert time.monotonic() - begun < 3
    with shared_memory(adapter(2), tmp_path / "v2", ALONE):
        assert files_of(tmp_path / "v2") == dict(adapter(2).files)


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
        "from orbit_runtime.rollout.transport import shared_memory\n"
        "from orbit_runtime.types import AdapterFiles\n"
        "files = {'adapter_config.json': b'{}', 'adapter_model.safetensors': b'x' * 5_000_003}\n"
        "with shared_memory(AdapterFiles(1, files, 'sha256:ab'), Path(sys.argv[1]), ('a',)):\n"
        "    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "v1")], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    path = ticket_of(tmp_path / "v1").memory.path
    assert os.path.exists(path)
    assert not named_memory(5_000_003)
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    assert not os.path.exists(path)
    assert not named_memory(5_000_003)


def test_each_copy_gets_a_ticket_once_and_files_when_it_tries_again(tmp_path: Path) -> None:
    with shared_memory(adapter(1), tmp_path / "v1", ("replica 0", "replica 1")) as handover:
        assert [handover.take(f"replica {index}") for index in (0, 1, 1, 2)] == [True, True, False, False]


def test_files_that_are_not_as_long_as_was_published_are_refused_by_name(tmp_path: Path) -> None:
    """Their bytes are proven where they stand, in the slots: `tests/engines/test_transports.py`."""
    published, folder = adapter(1), tmp_path / "v1"
    with shared_memory(published, folder, ALONE):
        ticket = ticket_of(folder)
        longer = replace(ticket, places={**ticket.places, "rotations.safetensors": (4096, 5000)})
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
        "from orbit_runtime.rollout.transport import shared_memory\n"
        "from orbit_runtime.sglang_plugin.adapter_loading import files_of\n"
        "from orbit_runtime.types import AdapterFiles\n"
        "files = {'adapter_config.json': b'{}', 'adapter_model.safetensors': bytes(range(256)) * 20_000}\n"
        "try:\n    Path('/dev/shm/a').write_bytes(files['adapter_model.safetensors'])\n"
        "except OSError as error:\n    print(error.strerror)\n"
        "with shared_memory(AdapterFiles(1, files, files_digest(files)), Path(sys.argv[1]), ('a',)):\n"
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
    desk = FolderMailbox(tmp_path / "desk")
    desk.take("policy-v1", AdapterFiles(1, FILES, "tree:1"))
    assert read(desk.home("policy-v1")) == {}
    folder = desk.files("policy-v1")
    assert read(folder) == FILES
    assert desk.files("policy-v1") == folder
    with desk.explaining("policy-v1") as places:
        assert list(places) == [folder]
        assert read(folder) == {**FILES, EXPLAIN_FILE: b""}
    assert read(folder) == FILES
    with desk.carry("policy-v1", ALONE) as handover:
        assert handover is None
    desk.drop("policy-v1")
    assert not folder.exists()
    assert desk.names() == ()


def test_a_file_that_was_changed_in_the_store_is_not_handed_over(tmp_path: Path) -> None:
    adapter, desk = stored(tmp_path / "run"), FolderMailbox(tmp_path / "desk")
    assert adapter_bytes(adapter) == sum(map(len, FILES.values()))
    desk.take("policy-v1", adapter)
    key = "adapters/policy-v1/adapter_model.safetensors"
    open_store(str(tmp_path / "run")).put(key, bytes(200))
    with pytest.raises(GateError, match=f"{key} is not what the trainer wrote there"):
        desk.files("policy-v1")
    open_store(str(tmp_path / "run")).put(key, FILES["adapter_model.safetensors"])
    assert read(desk.files("policy-v1")) == FILES
