"""SGLang's own server, on a CPU, with nothing of Orbit in its processes but the stand-ins for compiled CUDA packages.

Those are loaded from their file, so that no package of ours is imported: neither plug-in, nor hooks, nor read-back.
"""

import importlib.util
import os
import sys
from pathlib import Path

STAND_INS = Path(__file__).parents[2] / "orbit_runtime" / "sglang_plugin" / "cpu.py"

os.environ.update(SGLANG_USE_CPU_ENGINE="1", SGLANG_PLUGINS="none")
spec = importlib.util.spec_from_file_location("stand_ins", STAND_INS)
stand_ins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_ins)
stand_ins.install()
assert not any(name.startswith("orbit_runtime") for name in sys.modules)

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
