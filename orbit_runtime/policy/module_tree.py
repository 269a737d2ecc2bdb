"""Makes the record of a type (`model_info.module_tree`) from transformers' modules.

`python -m orbit_runtime.policy.module_tree` reads `{"config": …, "names": […]}` and prints the record; `names` are
those of a checkpoint's tensors, one for each of their forms.

Belongs here: what each tensor is, by the module that it fills. Does not belong here: sizes, and what is kept where.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from orbit_runtime.errors import OrbitError
from orbit_runtime.model_info.checkpoint import read_config
from orbit_runtime.model_info.module_tree import REFUSED, pattern_of
from orbit_runtime.policy.attention import layers_of
from orbit_runtime.policy.families import DENSE, Family
from orbit_runtime.policy.families.published import form_of, published_family
from orbit_runtime.policy.load import INDEXER, ROUTERS, build_model, is_router, sorted_targets

SIZES = (
    "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "global_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "state_size", "mamba_d_state",
    "ssm_state_size", "linear_key_head_dim",
)  # fmt: skip
PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k", "num_experts_per_token")
"""Names of the number of experts that a token uses."""
MIXER = re.compile("mamba|conv|delta|lightning|recurrent|rglru|ssm|linear_attn", re.IGNORECASE)
"""Parts of the names of what mixes tokens with a state of its own, in place of keys and values."""


def make_record(folder: Path, names: list[str]) -> dict[str, Any]:
    """Args: names: of tensors in the checkpoint."""
    raw = read_config(folder)
    try:
        model, mode = build_model(folder, raw, DENSE, None)
    except OrbitError as error:
        return {"refused": error.message.rpartition(REFUSED)[2]}
    config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    family = published_family(model, names, mode.uncalled)
    roles = {pattern_of(name): "other" for name in names}
    found = dict(_roles(model, family))
    roles |= {key: found[key] for key in roles if key in found}
    targets = {
        target: None
        for name, role in found.items()
        if name in roles and INDEXER not in name and not role.startswith(("router", "head"))
        for target in role.split()[1:]
    }
    sizes = {}
    for name in (*SIZES, PER_TOKEN[0]):
        used = next((each for each in PER_TOKEN if hasattr(config, each)), name) if name in PER_TOKEN else name
        used = config.attribute_map.get(used, used)
        usual = getattr(type(config), used, None)
        if used != name or isinstance(usual, int):
            sizes[name] = [used, usual if isinstance(usual, int) else None]
    return {
        "roles": roles,
        "targets": list(sorted_targets(targets)),
        "sizes": sizes,
        "passes": mode.text or "packed",
        "transposed": any(isinstance(each, Conv1D) for each in layers_of(model).modules()),
    }


def _roles(model: nn.Module, family: Family) -> Iterator[tuple[str, str]]:
    """Pattern of a checkpoint's name → role and targets."""
    layers = layers_of(model)
    prefix = type(model).__name__.removesuffix("ForCausalLM")
    places = {id(module): name for name, module in layers.named_modules()}
    classes = {name: type(module).__name__.removeprefix(prefix) for name, module in layers.named_modules()}
    ends = {id(model.get_input_embeddings()): "embedding", id(model.get_output_embeddings()): "head lm_head"}
    for name, module in model.named_modules():
        last, place = name.rpartition(".")[2], places.get(id(module), "")
        own = pattern_of(family.checkpoint_name(name))
        if id(module) in ends:
            yield own, ends[id(module)]
        elif type(module).__name__.endswith("Experts"):
            yield from _experts(module, name, family)
        elif not isinstance(module, nn.Linear | Conv1D):
            if type(module).__name__.endswith("Router") or last in ROUTERS:
                yield own, "router"
        elif f".{last}" in family.no_targets or name.endswith(family.kept_linears):
            yield own, "other"
        elif is_router(place):
            yield own, f"router {last}"
        else:
            parts = place.split(".")
            above = [classes[".".join(parts[:end])] for end in range(2, len(parts))]
            yield own, f"{_role(' '.join((*parts[1:], *above)))} {last}"


def _role(said: str) -> str:
    """Args: said: names and classes of the modules that a linear is in."""
    if "shared" in said:
        return "shared_expert"
    if MIXER.search(said):
        return "mixer"
    return "attention" if re.search("att", said, re.IGNORECASE) else "dense_mlp"


def _experts(module: Any, name: str, family: Family) -> Iterator[tuple[str, str]]:
    form = form_of(module, family.checkpoint_name)
    if form is None:
        return
    for projection in form.projections:
        sources = family.expert_sources(name, projection.name)
        if sources:
            yield pattern_of(sources[0]), f"routed_expert {projection.name}"
    if not family.expert_sources(name, "down_proj"):
        first = "gate_up_proj" if module.has_gate else "up_proj"
        yield (
            pattern_of(family.checkpoint_name(f"{name}.{first}")),
            ("routed_expert gate_proj up_proj" if module.has_gate else "routed_expert up_proj"),
        )
        yield pattern_of(family.checkpoint_name(f"{name}.down_proj")), "routed_expert down_proj"


def main() -> None:
    asked = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(asked["config"]))
        print(json.dumps(make_record(Path(scratch), asked["names"])))


if __name__ == "__main__":
    main()
