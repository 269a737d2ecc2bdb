"""A publish and a checkpoint of hundreds of megabytes need little memory beside them.

Measured by the kernel, in a process of its own: the most that was resident while it ran.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ALLOWED = 64 << 20
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""What is freed goes back at once. By itself glibc keeps up to 64 MiB at the top of its heap for the next one, which
would be measured as if it were in use, or as room that was there before."""
BODY = """
import gc, json, os, sys
import torch
from torch import nn
from orbit_runtime.adapters.buffer import AdapterBuffer
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.inject import inject
from orbit_runtime.adapters.files import files_digest
from orbit_runtime.adapters.state import load_slot, slot_digest, write_adapter
from orbit_runtime.digests import split
from orbit_runtime.storage import CheckpointParts
from orbit_runtime.storage import Content, claim_execution, open_store, read_bundle, write_bundle
from orbit_runtime.training.state import PART, build_state, unpack_state
from orbit_runtime.types import AdapterManifest

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        narrow = {"dtype": torch.bfloat16, "bias": False}
        self.q_proj, self.up_proj = nn.Linear(65536, 256, **narrow), nn.Linear(256, 65536, **narrow)

torch.set_num_threads(1)
config = AdapterConfig("LoRA", ("q_proj", "up_proj"), rank=256, alpha=6.0)
with torch.no_grad():
    injected = inject(nn.Sequential(Block(), Block(), Block()), config.targets, config, 1)
    for parameter in injected.parameters():
        parameter.uniform_(-1, 1)
masters = injected.masters.parameters
optimizer = torch.optim.AdamW(masters.values(), fused=True)
store = open_store(sys.argv[1])
execution = claim_execution(store, run_name="memory")
write_bundle(store, execution, "warm/up-1", {"a": bytes(40 << 20)}, {})

def resident(name):
    gc.collect()
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024

def peak(work):
    before = resident("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    result = work()
    told[work.__name__] = resident("VmHWM") - before
    return result

def publish():
    buffer = AdapterBuffer()
    manifest = write_adapter(injected, config, "base", buffer)
    return buffer, manifest

def store_it():
    files = buffer.files()
    parts = {
        name: Content(memoryview(data).nbytes, lambda data=data, name=name: split(data, manifest.files[name]),
                      manifest.files[name])
        for name, data in files.items()
    }
    write_bundle(store, execution, "adapters/policy-v1", parts, {}, plain_names=True)
    return files

def load():
    load_slot(injected.layers, "policy-v1", files)
    assert slot_digest(injected.layers, "policy-v1", bytes(files["adapter_config.json"])) == manifest.digest

def checkpoint():
    parts = CheckpointParts("checkpoints/step-000001")
    file = build_state(masters, optimizer, {"updates": 0, "steps": 0})
    parts.write(PART, file.size, file.pieces)
    write_bundle(store, execution, "checkpoints/step-000001", parts.contents, {})

def resume():
    bundle = read_bundle(store, "checkpoints/step-000001")
    unpack_state(bundle.parts[PART], masters, optimizer)

told = {}
buffer, manifest = peak(publish)
files = peak(store_it)
peak(load)
injected.layers and [layer.slots.clear() for layer in injected.layers.values()]
peak(checkpoint)
peak(resume)
told["adapter"] = sum(piece.bytes for pieces in manifest.files.values() for piece in pieces)
told["state"] = sum(parameter.numel() * 4 for parameter in masters.values())
print(json.dumps(told))
"""


@pytest.mark.timeout(600)  # a gigabyte in all, on a machine that may be busy with something else
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel does not tell the peak anew")
def test_a_publish_and_a_checkpoint_need_at_most_64_mib_beside_the_adapter(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BODY, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=550,
        env={**os.environ, **AT_ONCE},
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    adapter, state = told["adapter"], told["state"]
    assert adapter > 190 << 20
    assert state > 380 << 20
    assert told["store_it"] <= adapter + ALLOWED, told
    # The slot itself is fp32 here: what the layers multiply by.
    assert told["load"] <= 2 * adapter + adapter + ALLOWED, told
    assert told["checkpoint"] <= ALLOWED, told
    assert told["resume"] <= state + ALLOWED, told
    # The memory that holds the published bytes is no process's own, until it is mapped to be read.
    assert told["publish"] <= ALLOWED, told
