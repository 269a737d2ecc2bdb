"""An engine's server, played: tells what it was given, then does as its arguments say.

Arguments: `live` (until it is ended), `end CODE`, `child` (lives, and has a child that ignores SIGTERM).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from orbit_runtime.workers.child.run_token import token_from_pipe

if __name__ == "__main__":
    for name in ("ORBIT_SGLANG_PARENT", "ORBIT_SGLANG_TAPS"):
        print(f"{name}={os.environ.get(name)}")
    print(f"token={token_from_pipe()}")
    print(f"pid={os.getpid()}", flush=True)
    what = sys.argv[1]
    if what == "end":
        sys.exit(int(sys.argv[2]))
    if what == "child":
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", deaf])
        print(f"child={child.pid}", flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(60)
