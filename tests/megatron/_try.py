import sys
import tempfile
import time
from pathlib import Path

from tests.integration.tiny_families import make_family
from tests.megatron.cases import differences, in_one_process, on_a_rank, sizes_of
from tests.megatron.ranks import world
from tests.models.family_matrix import Case

if __name__ == "__main__":
    cases = [Case(*text.split("-")) for text in sys.argv[2:]]
    sizes = eval(sys.argv[1])
    root = Path(tempfile.mkdtemp())
    with world(sizes) as ranks:
        for n, case in enumerate(cases):
            (root / str(n)).mkdir()
            packed, _ = make_family(root / str(n), case.family, case.layout, sizes=sizes_of(case))
            t = time.time()
            try:
                print(
                    case,
                    differences(in_one_process(packed, case), ranks.call(on_a_rank, packed, case), case),
                    f"{time.time() - t:.1f}s",
                    flush=True,
                )
            except Exception as e:
                print(case, "FAILED", str(e)[-1500:], flush=True)
