"""Does it work? A run that is killed and goes on, both adapters on every packed format, an answer over HTTP; and, where
they were brought, SGLang, ranks on two cards and a real model.

Belongs here: short runs, proven to their end. Does not belong here: times (`rl_step`), bits (`determinism`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import ROOT, NotMeasured
from orbit_runtime.loop import run as train
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.serve.open import ServeRequest, open_models
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.serve.server import start_serving
from orbit_runtime.spec import OrbitRun, load_manifest
from orbit_runtime.workers.servers.process import PYTHON_VARIABLE
from tests.integration.killing import small_manifest
from tools.gpu_proof.record import Record, WrongResult

FORMATS = ("INT4", "NVFP4", "FP8")
REAL_MODEL = "ORBIT_REAL_MODEL"
NOT_BROUGHT = "not run: not brought"


def run(record: Record, *, what: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        {"resume": resume, "formats": formats, "serve": serve}.get(what, brought)(record, Path(folder), what)


def resume(record: Record, folder: Path, _: str) -> None:
    """Kills a run with SIGKILL after its first checkpoint; the same command continues it."""
    steps, out = 4 if record.is_tiny else 20, folder / "run"
    (folder / "run.json").write_text(json.dumps(small_manifest(steps=steps)))
    command = [sys.executable, "-m", "orbit_runtime", "run", str(folder / "run.json"), "--out", str(out)]
    with subprocess.Popen(command, cwd=ROOT) as killed:
        while killed.poll() is None and not list(out.glob("checkpoints/*/manifest.json")):
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
    record.add("killed", {"exit": killed.returncode, "after steps": len(list(out.glob("checkpoints/*/manifest.json")))})
    if killed.returncode != -signal.SIGKILL:
        raise WrongResult(f"the run ended with {killed.returncode} before it could be killed")
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status:
        raise WrongResult(f"the run that was killed ended with {status} when it went on")
    report = check(record, "went on", out)
    if (report["steps"], report["resumed"]) != (steps, 1):
        raise WrongResult(f"{report['steps']} of {steps} steps, resumed {report['resumed']} times")


def formats(record: Record, folder: Path, _: str) -> None:
    for adapter in ("LoRA", "OFT"):
        for precision in FORMATS[: 1 if record.is_tiny else None]:
            manifest = small_manifest(steps=1 if record.is_tiny else 3, adapter=adapter)
            manifest["spec"]["model"]["precision"] = precision
            trained(record, f"{adapter} on {precision}", manifest, folder / f"{adapter}-{precision}")


def serve(record: Record, folder: Path, _: str) -> None:
    import httpx

    trained(record, "run", small_manifest(steps=1), folder / "run")
    serving = start_serving(
        open_models(ServeRequest(str(folder / "run")), ServeLimits(), lambda _: None), "127.0.0.1", 0, None
    )
    try:
        names = [each["id"] for each in httpx.get(f"{serving.url}/v1/models", timeout=60).json()["data"]]
        for name in names:
            asked = {"model": name, "messages": [{"role": "user", "content": "12+34="}], "max_tokens": 4}
            answer = httpx.post(f"{serving.url}/v1/chat/completions", json=asked, timeout=60)
            record.add(f"answer of {name}", {"status": answer.status_code, "body": answer.json()})
            if answer.status_code != 200:
                raise WrongResult(f"{name} answered with {answer.status_code}")
    finally:
        serving.close()


def brought(record: Record, folder: Path, what: str) -> None:
    """Runs what needs more than a card: `sglang`, `ranks` (a second card), `real-model`."""
    has_sglang = bool(os.environ.get(PYTHON_VARIABLE)) or find_spec("sglang") is not None
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    manifest = small_manifest(steps=2)
    if what == "real-model":
        if not (model := os.environ.get(REAL_MODEL)) or record.is_tiny:
            raise NotMeasured(f"{NOT_BROUGHT} ({REAL_MODEL})")
        manifest = load_manifest(ROOT / "examples" / "smollm2.yaml", [f"model.uri={model}"]).to_manifest()
        manifest["spec"]["training"]["steps"] = 2
    elif not has_sglang or record.is_tiny:
        raise NotMeasured(f"{NOT_BROUGHT} (SGLang: {PYTHON_VARIABLE})")
    elif what == "ranks" and (cards < 2 or not (find_spec("megatron") and find_spec("ray"))):
        raise NotMeasured(f"{NOT_BROUGHT} (a second card, Megatron-Core, Ray)")
    else:
        manifest["spec"]["rollout"]["engine"] = "SGLang"
        manifest["spec"]["training"]["trainer"] = "Megatron" if what == "ranks" else "Torch"
    trained(record, what, manifest, folder / what)


def trained(record: Record, name: str, manifest: Mapping[str, Any], out: Path) -> None:
    spec = OrbitRun.model_validate(manifest)
    train(spec, out=str(out), progress=SilentProgress(), manifest_folder=ROOT / "examples")
    check(record, name, out)


def check(record: Record, name: str, out: Path) -> dict[str, Any]:
    """The run's report, after every publish was proven, on the device that was asked for."""
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    device = json.loads((out / "run.json").read_text())["device"]
    found = {key: report[key] for key in ("steps", "publishes", "publishes_proven", "seconds")}
    record.add(name, {"device": device, **found})
    if device != record.device or report["publishes_proven"] != report["publishes"]:
        raise WrongResult(f"{name}: on {device}, {report['publishes_proven']} of {report['publishes']} proven")
    return report
