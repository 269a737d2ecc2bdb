"""Sampling as fields of a request, under the names that SGLang and vLLM share."""

from __future__ import annotations

from typing import Any

from orbit_runtime.types import Sampling


def given_fields(sampling: Sampling) -> dict[str, Any]:
    """Sampling fields of a request under the names that SGLang and vLLM share; defaults are left out."""
    fields = {
        "top_k": sampling.top_k if sampling.top_k else None,
        "min_p": sampling.min_p if sampling.min_p else None,
        "repetition_penalty": sampling.repetition_penalty if sampling.repetition_penalty != 1.0 else None,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
        "ignore_eos": sampling.ignore_eos or None,
    }
    return {name: value for name, value in fields.items() if value is not None}
