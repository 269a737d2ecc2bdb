"""Projections that SGLang multiplies as one matrix, and the one scale that it has for them.

SGLang 0.5.23 takes the first or largest of the scales of `q_proj`, `k_proj` and `v_proj` (gate and up, and the experts'
likewise). In NVFP4 the other weights then have other values (`modelopt_quant.py`: "Accuracy may be affected"), and FP8
with a scale for a whole tensor is quantised anew (`requantize_with_max_scale`), except by the weight-only classes of
compressed-tensors' and DeepSeek's FP8. Exports of ModelOpt and llm-compressor give such projections one scale.
"""

from __future__ import annotations

from pathlib import Path

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.model_info.headers import TensorInfo, read_folder, read_header
from orbit_runtime.model_info.weights import SHARED_INPUTS

NVFP4_ENDINGS, FP8_ENDING = (".weight_scale_2", ".weight_global_scale"), ".weight_scale"


def check_fused_scales(folder: Path, *, keeps_fp8: bool) -> None:
    """Raises UnsupportedError (78) if projections that SGLang fuses have different scales for a whole tensor.

    Args:
        keeps_fp8: whether the server gives each row of FP8 its tensor's scale in linear layers; in experts none does.
    """
    if unequal := find_unequal(folder, keeps_fp8=keeps_fp8):
        first = ", ".join(unequal[0])
        others = f" and {len(unequal) - 1} more" if len(unequal) > 1 else ""
        raise UnsupportedError(
            f"SGLang multiplies {first}{others} as one matrix with one scale, and this checkpoint has one for each: "
            "samples would come from another base than the one that is trained",
            where=str(folder),
            fix="convert its BF16 original: `orbit convert ORIGINAL FOLDER --precision NVFP4` (or FP8)",
        )


def find_unequal(folder: Path, *, keeps_fp8: bool) -> list[tuple[str, ...]]:
    """The modules of each such group, in the order of their names."""
    scales: dict[str, bytes] = {}
    by_file: dict[Path, dict[str, TensorInfo]] = {}
    for name, (path, info) in read_folder(folder).items():
        endings = NVFP4_ENDINGS if keeps_fp8 and ".experts." not in name else (*NVFP4_ENDINGS, FP8_ENDING)
        ending = next((each for each in endings if name.endswith(each)), None)
        if ending is not None and all(size == 1 for size in info.shape):
            by_file.setdefault(path, {})[name.removesuffix(ending)] = info
    for path, infos in by_file.items():
        start = read_header(path).data_start
        with path.open("rb") as file:
            for module, info in infos.items():
                file.seek(start + info.start)
                scales[module] = file.read(info.num_bytes)
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for module in sorted(scales):
        parent, _, leaf = module.rpartition(".")
        for together in SHARED_INPUTS:
            if leaf in together:
                groups.setdefault((parent, together), []).append(module)
    return [tuple(group) for group in groups.values() if len({scales[each] for each in group}) > 1]
