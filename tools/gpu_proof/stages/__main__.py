"""One stage, in this process: `python -m tools.gpu_proof.stages NAME RECORD`, as the proof starts it.

Exit status 0: the record says what became of it. Any other: it does not, and the output has to.
"""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from pathlib import Path

from benchmarks.harness import NotMeasured
from tools.gpu_proof.record import Record, WrongResult
from tools.gpu_proof.stages import STAGES


def main(name: str, path: str) -> int:
    record = Record.read(Path(path))
    assert record is not None, f"{path} is no record"
    stage = STAGES[name]
    try:
        import_module(f"tools.gpu_proof.stages.{stage.module}").run(record, **stage.settings)
    except NotMeasured as error:
        record.end("not measured", str(error))
    except WrongResult as error:
        record.end("failed", str(error))
    except Exception as error:
        record.end("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
        traceback.print_exc()
    else:
        record.end("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
