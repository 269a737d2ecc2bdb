"""Engines: they complete prompts under a named adapter and report which policy version sampled each token.

Belongs here: the torch engine with its KV cache, and the engine over servers (SGLang started by Orbit, SGLang and vLLM
started by others). Does not belong here: the model (`policy`), scoring completions (`environments`), when to publish
(`loop`).
"""

from typing import TYPE_CHECKING

from orbit_runtime.lazy import lazily

if TYPE_CHECKING:
    from orbit_runtime.rollout.torch_engine import TorchEngine

__all__ = ["TorchEngine"]
# Torch is imported only when one of these is used.
__getattr__ = lazily(__name__, {"TorchEngine": "orbit_runtime.rollout.torch_engine"})
