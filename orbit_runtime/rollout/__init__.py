"""Engines: they answer prompts under a named adapter and say which policy version sampled every token.

Belongs here: the torch engine with its key/value cache, and the engine over servers (SGLang of our own, SGLang and vLLM
of others). Does not belong here: the model (`policy`), what a completion is worth (`environments`), when to publish
(`loop`).
"""

from typing import TYPE_CHECKING

from orbit_runtime.lazy import lazily

if TYPE_CHECKING:
    from orbit_runtime.rollout.torch_engine import TorchEngine

__all__ = ["TorchEngine"]
# Only who asks for these imports torch.
__getattr__ = lazily(__name__, {"TorchEngine": "orbit_runtime.rollout.torch_engine"})
