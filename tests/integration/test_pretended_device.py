"""A pretended CUDA device: it refuses what a device refuses, and counts what waits for it.

Does not belong here: values on a real one (`tests/gpu`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.pretended_cuda import pretended_environment

pytestmark = pytest.mark.timeout(600)


REFUSED = {
    "torch.ones(3, device='cuda') + torch.ones(3)": "found cpu and cuda:0",
    "torch.ones(3, device='cuda:0') + torch.ones(3, device='cuda:1')": "found cuda:0 and cuda:1",
    "torch.ones(3, device='cuda').bernoulli_(generator=torch.Generator())": "a 'cuda' generator",
    "torch._fused_adamw_([x], [x], [x], [x], [], [torch.ones(())], lr=1.0, beta1=0.9, beta2=0.9, weight_decay=0.0, "
    "eps=1e-8, amsgrad=False, maximize=False)": "found cpu and cuda:0",
    "torch.ones(3).pin_memory()": "is pinned",
}
WAITS = {
    "x.sum().item()": 1,
    "x.tolist()": 1,
    "x.cpu()": 1,
    "x[x > 1]": 1,
    "x.nonzero()": 1,
    "bool((x > 1).any())": 1,
    "x[[0, 2]]": 1,
    "torch.tensor([1.0], device='cuda')": 1,
    "torch.cuda.synchronize()": 1,
    "x.add_(1) @ x": 0,
    "x.to('cuda:1')": 0,
    "torch.zeros(3, device='cuda')[1:]": 0,
}
"""Expression → how often it waits; `x` lies on the device."""
TOLD = """
import json, torch
from tests.fakes.pretended_cuda.device import waits
x = torch.arange(4.0, device="cuda")
refused, counted = {}, {}
for each in REFUSED:
    try:
        eval(each)
    except RuntimeError as error:
        refused[each] = str(error)
for each in WAITS:
    waits.clear()
    eval(each)
    counted[each] = waits.total()
draws = [torch.rand(3, generator=torch.Generator("cuda:1").manual_seed(1), device="cuda:1").tolist() for _ in range(2)]
moved = x.to("cuda:1")
print(json.dumps([refused, counted, draws, moved.tolist(), x.tolist(), str(moved.device)]))
"""


def test_the_pretended_device_refuses_and_waits_as_a_device_does(tmp_path: Path) -> None:
    program = TOLD.replace("REFUSED", repr(list(REFUSED))).replace("WAITS", repr(list(WAITS)))
    environment = {**os.environ, **pretended_environment(tmp_path, cards=2)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    refused, counted, draws, moved, values, device = json.loads(done.stdout)
    assert [each for each, words in REFUSED.items() if words not in refused.get(each, "")] == []
    assert counted == WAITS
    assert draws[0] == draws[1]
    assert (moved, device) == (values, "cuda:1")
