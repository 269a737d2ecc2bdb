"""Every fault of every layer, planted in running SGLang servers one after the other: the bisect names each.

    make test-bisect                                   all of them, a few minutes
    python -m tests.engines.bisect_matrix deepseek_v3  those of one model

The ordinary tests run `sample()`. A fault is planted in the server's own tensors and constants and taken back; servers
are started once. What is expected is the point whose result depends on it first, and the tensor or constant by name.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.state import load_slot, published_tensors, remove_slot
from orbit_runtime.parity.locate import Location, locate
from orbit_runtime.policy import Policy
from orbit_runtime.policy.snapshot import ROTARY, Snapshot, take_snapshot
from orbit_runtime.quant.formats import FORMATS
from orbit_runtime.quant.linear import FrozenLinear
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.types import AdapterFiles
from tests.engines.inside_server import inside_environment, run_inside_of
from tests.engines.test_families import DEEPSEEK_LORA, LORA_EXPERTS, MLP, OFT_EXPERTS, serve
from tests.integration.engine_inputs import random_adapter
from tests.models.family_matrix import tokens_of

TOKENS = tokens_of(19, 5)
GROUP = 32
"""Columns of a scale of the packed base."""
MODELS: Mapping[str, tuple[str, str, AdapterConfig]] = {
    "qwen3": ("qwen3", "INT4", replace(LORA_EXPERTS, experts="None")),
    "qwen3-OFT": ("qwen3", "INT4", replace(OFT_EXPERTS, experts="None")),
    "qwen3_moe": ("qwen3_moe", "INT4", LORA_EXPERTS),
    "qwen3_moe-OFT": ("qwen3_moe", "INT4", OFT_EXPERTS),
    "glm4_moe": ("glm4_moe", "INT4", LORA_EXPERTS),
    "deepseek_v3": ("deepseek_v3", "INT4", DEEPSEEK_LORA),
}  # fmt: skip
"""Name → family, format of the trainer's packed base, adapter. A server on a CPU holds the same values unpacked."""
HOLDS = (
    "from orbit_runtime.sglang_plugin.weights import base_weights\n"
    "from orbit_runtime.sglang_plugin.readback import _pieces, take_adapters\n"
    "model = manager.base_model\n"
    "modules = dict(model.named_modules(remove_duplicate=False))\n"
    "kept = manager.__dict__.setdefault('planted', {})\n"
)


@dataclass(frozen=True)
class Fault:
    """One thing wrong in a server."""

    kind: str
    name: str
    plant: str
    """Code that runs in the server; what it needs to take the fault back it leaves in `kept`."""
    heal: str
    point: str | None
    """First that differs; None: it is in no result of the canary's."""
    causes: tuple[str, ...]
    """Names of tensors or constants; several that are one in the server."""
    detail: str = ""
    """What the cause's words contain."""
    is_adapters: bool = False
    """Only passes with an adapter show it."""


@dataclass
class Bench:
    """One server and the trainer it is compared with, whose own snapshots are taken once."""

    policy: Policy
    engine: ServedEngine
    code: Path
    adapter: AdapterFiles
    _ours: dict[bool, tuple[Snapshot, Snapshot]] = field(default_factory=dict)

    def compare(self, *, adapted: bool) -> Location:
        slot, name = ("compared", "policy-v1") if adapted else (None, None)
        if adapted not in self._ours:
            if slot:
                load_slot(self.policy.injected.layers, slot, self.adapter.files)
            files = self.adapter.files
            again = take_snapshot(self.policy, TOKENS, slot, files, copies=3)
            self._ours[adapted] = take_snapshot(self.policy, TOKENS, slot, files), again
            if slot:
                remove_slot(self.policy.injected.layers, slot)
        ours, again = self._ours[adapted]
        theirs = self.engine.copies()[0].snapshot(TOKENS, name)
        return locate(ours, again, theirs, dtype="float32", group=GROUP)

    def try_fault(self, fault: Fault) -> str:
        """What is wrong with the verdict; empty: the fault is named."""
        run_inside_of(self.engine, self.code, HOLDS + fault.plant)
        try:
            found = self.compare(adapted=fault.is_adapters)
        finally:
            run_inside_of(self.engine, self.code, HOLDS + fault.heal)
        return verdict(fault, found)


def verdict(fault: Fault, found: Location) -> str:
    if found.missing or found.not_compared:
        return f"not everything was compared: {found.sentence()}"
    if found.point != fault.point:
        return f"expected at {fault.point}: {found.sentence()}"
    names = [cause.name for cause in found.causes]
    if tuple(sorted(names)) != tuple(sorted(fault.causes)) or fault.detail not in found.causes[0].detail:
        return f"expected {' and '.join(fault.causes)} {fault.detail!r}: {found.sentence()}"
    return ""


@contextmanager
def start(name: str, folder: Path) -> Iterator[Bench]:
    family, layout, config = MODELS[name]
    code = folder / "code.py"
    before = {key: os.environ.get(key) for key in inside_environment(code)}
    os.environ.update(inside_environment(code))
    try:
        with serve(family, layout, config, folder) as (policy, engine):
            adapter = random_adapter(policy, 1)
            engine.load_adapter("policy-v1", adapter)
            yield Bench(policy, engine, code, adapter)
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


# --- faults ---


def all_faults(bench: Bench) -> list[Fault]:
    """The faults of every layer of the model."""
    policy, adapter = bench.policy, bench.adapter
    routed = chosen_experts(policy)
    kinds: Sequence[Callable[[], Iterator[Fault]]] = (
        lambda: weight_bits(policy), lambda: group_scales(policy), lambda: experts(policy, routed),
        lambda: plain_weights(policy), lambda: epsilons(policy), lambda: rotary_bases(policy),
        lambda: routers(policy), lambda: adapter_slices(policy, adapter),
    )  # fmt: skip
    return [fault for made in kinds for fault in made()]


def sample(bench: Bench) -> list[Fault]:
    """One of each kind, in the last layer that has it."""
    return list({fault.kind: fault for fault in all_faults(bench)}.values())


def linears(policy: Policy) -> Iterator[tuple[str, FrozenLinear]]:
    for name, module in policy.model.named_modules():
        if isinstance(module, FrozenLinear):
            yield name.removesuffix(".base"), module


def weight_bits(policy: Policy) -> Iterator[Fault]:
    """Each of the four bits of a packed value."""
    for name, linear in linears(policy):
        if not hasattr(linear, "weight_packed"):
            continue
        for bit in range(4):
            changed = with_packed(linear, "weight_packed", lambda t, bit=bit: flip(t, row=3, byte=5, bit=bit))
            yield weights("weight bit", name, linear, changed, f"1 of {changed.numel()} values differ")


def group_scales(policy: Policy) -> Iterator[Fault]:
    for name, linear in linears(policy):
        if not hasattr(linear, "weight_scale"):
            continue
        last = linear.weight_scale.shape[1] - 1
        changed = with_packed(linear, "weight_scale", lambda t, last=last: t[5, last].mul_(1.5))
        words = f"all in row 5, columns {last * GROUP} to {last * GROUP + GROUP - 1}: one group's scale"
        yield weights("scale group", name, linear, changed, words)


def flip(packed: Tensor, *, row: int, byte: int, bit: int) -> None:
    packed.view(torch.uint8)[row, byte] ^= 1 << bit


def with_packed(linear: FrozenLinear, buffer: str, change: Callable[[Tensor], object]) -> Tensor:
    """The layer's values with one of its packed tensors changed."""
    held = getattr(linear, buffer)
    before = held.clone()
    change(held)
    try:
        return linear.dense(linear.views(), torch.bfloat16).float().clone()
    finally:
        held.copy_(before)


def weights(kind: str, name: str, linear: FrozenLinear, changed: Tensor, words: str) -> Fault:
    ours = linear.dense(linear.views(), torch.bfloat16).float()
    places = (ours != changed).nonzero().tolist()
    cells = [(row, column, changed[row, column].item(), ours[row, column].item()) for row, column in places]
    if name.endswith("kv_b_proj"):
        return latent_weights(kind, name, linear, cells, words)
    held = f"t = {{h.name: h for h in base_weights(model)}}['{name}.weight'].read()\n"
    plant = held + "".join(f"t[{row}, {column}] = {new!r}\n" for row, column, new, _ in cells)
    heal = held + "".join(f"t[{row}, {column}] = {old!r}\n" for row, column, _, old in cells)
    return Fault(kind, name, plant, heal, name, (f"{name}.weight",), words)


def latent_weights(
    kind: str, name: str, linear: FrozenLinear, cells: list[tuple[int, int, float, float]], words: str
) -> Fault:
    """In the two matrices that SGLang multiplies by: `w_kc` `[H, nope, R]`, `w_vc` `[H, R, v]`."""
    attention = name.removesuffix(".kv_b_proj")

    def code(which: int) -> str:
        lines = [f"a = modules['{attention}']\n", "nope, v = a.w_kc.shape[1], a.w_vc.shape[2]\n"]
        for cell in cells:
            lines += [
                f"h, r = divmod({cell[0]}, nope + v)\n",
                "t = a.w_kc[h, r] if r < nope else a.w_vc[h, :, r - nope]\n",
                f"t[{cell[1]}] = {cell[which]!r}\n",
            ]
        return "".join(lines)

    return Fault(kind, name, code(2), code(3), f"{attention}.attended", (f"{name}.weight",), words)


def plain_weights(policy: Policy) -> Iterator[Fault]:
    """What is not packed: norms, routers, their biases, the embedding."""
    points = {"q_norm": "query", "k_norm": "key", "q_a_layernorm": "q_b_proj", "kv_a_layernorm": "attended"}
    for name, module in policy.model.named_modules():
        last = name.rpartition(".")[2]
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if last not in points and not last.endswith(("layernorm", "norm", "gate", "embed_tokens")):
                continue
            if not tensor.is_floating_point() or "lora" in key or ".experts." in name:
                continue
            place = "[0]" if tensor.dim() == 1 else "[0, 0]" if last == "gate" else f"[{TOKENS[0]}, 0]"
            held = f"t = {{h.name: h for h in base_weights(model)}}['{name}.{key}'].read()\n"
            parent = name.rpartition(".")[0]
            point = f"{parent}.{points[last]}" if last in points else name
            if key == "e_score_correction_bias":
                # Scores are the same; a bias so large chooses its expert for every token.
                plant, point = f"{held}kept['v'] = t[0].item()\nt[0] = 50.0\n", parent
            else:
                plant = f"{held}kept['v'] = t{place}.item()\nt{place} += 0.5\n"
            yield Fault("unpacked", f"{name}.{key}", plant, f"{held}t{place} = kept['v']\n", point, (f"{name}.{key}",))


def epsilons(policy: Policy) -> Iterator[Fault]:
    points = {"q_norm": "query", "k_norm": "key", "q_a_layernorm": "q_b_proj", "kv_a_layernorm": "attended"}
    for name, _ in policy.model.named_modules():
        parent, _, last = name.rpartition(".")
        if not last.endswith("norm"):
            continue
        point = f"{parent}.{points[last]}" if last in points else name
        plant = f"m = modules['{name}']\nkept['v'] = m.variance_epsilon\nm.variance_epsilon = 0.01\n"
        heal = f"modules['{name}'].variance_epsilon = kept['v']\n"
        yield Fault("norm epsilon", name, plant, heal, point, (f"{name}.eps",), "in the trainer, 0.01 in the engine")


def rotary_bases(policy: Policy) -> Iterator[Fault]:
    """In one layer only: its own copy of the embedding that all share, with angles of half the speed."""
    for name, module in policy.model.named_modules():
        if not name.endswith(".self_attn"):
            continue
        plant = (
            f"import copy\na = modules['{name}']\nkept['v'] = a.rotary_emb\na.rotary_emb = copy.deepcopy(kept['v'])\n"
            "c = a.rotary_emb.cos_sin_cache\nc.copy_(c[c.new_zeros(len(c)).long().add(1).cumsum(0) // 2])\n"
        )
        point = f"{name}.attended" if hasattr(module, "kv_b_proj") else f"{name}.query"
        heal = f"modules['{name}'].rotary_emb = kept['v']\n"
        yield Fault("rope base", name, plant, heal, point, (f"{name}.{ROTARY}",), "another base, scaling or kind")


def routers(policy: Policy) -> Iterator[Fault]:
    for name, module in policy.model.named_modules():
        if not name.endswith(".mlp.gate") or not hasattr(module, "top_k"):
            continue
        plant = (
            "def rounded(_, __, r):\n"
            "    first = (r[0] if isinstance(r, tuple) else r).bfloat16().float()\n"
            "    return (first, *r[1:]) if isinstance(r, tuple) else first\n"
            f"kept['v'] = modules['{name}'].register_forward_hook(rounded)\n"
        )
        yield Fault(
            "router dtype", name, plant, "kept['v'].remove()\n", name, (f"{name}.precision",), "rounded to BF16"
        )


def experts(policy: Policy, routed: Mapping[str, tuple[int, int | None]]) -> Iterator[Fault]:
    """A bit and a scale of each projection of an expert that tokens of the canary go to, and of one without any."""
    for layer, (used, unused) in routed.items():
        for projection in MLP:
            module = policy.model.get_submodule(f"{layer}.experts.{projection}")
            module = getattr(module, "base", module)
            for expert, point in ((used, layer), (unused, None)):
                if expert is None:
                    continue
                for kind, buffer, change in (
                    ("expert's weight bit", "weight_packed", lambda t: flip(t, row=3, byte=5, bit=3)),
                    ("expert's scale group", "weight_scale", lambda t: t[5, 0].mul_(1.5)),
                ):
                    held = module._buffers[buffer][expert]
                    before, ours = held.clone(), FORMATS[module.format].dequantize(module.stack.expert(expert)).float()
                    change(held)
                    changed = FORMATS[module.format].dequantize(module.stack.expert(expert)).float()
                    held.copy_(before)
                    yield expert_weights(kind, f"{layer}.experts.{expert}.{projection}", ours, changed, point)


def expert_weights(kind: str, name: str, ours: Tensor, changed: Tensor, point: str | None) -> Fault:
    held = f"t = {{h.name: h for h in base_weights(model)}}['{name}.weight'].read()\n"
    places = (ours != changed).nonzero().tolist()
    plant, heal = (
        held + "".join(f"t[{row}, {column}] = {values[row, column].item()!r}\n" for row, column in places)
        for values in (changed, ours)
    )
    return Fault(kind, name, plant, heal, point, (f"{name}.weight",), f"{len(places)} of {ours.numel()} values differ")


def chosen_experts(policy: Policy) -> dict[str, tuple[int, int | None]]:
    """Layer → an expert that tokens of the canary are sent to, and one that none is, if there is one."""
    seen: dict[str, set[int]] = {}
    handles = [
        module.register_forward_hook(
            lambda _, __, result, name=name: seen.setdefault(name.removesuffix(".gate"), set()).update(
                result[2].flatten().tolist()
            )
        )
        for name, module in policy.model.named_modules()
        if name.endswith(".mlp.gate") and hasattr(module, "top_k")
    ]
    take_snapshot(policy, TOKENS[:3], None, {}, copies=2)
    few = {name: set(each) for name, each in seen.items()}
    take_snapshot(policy, TOKENS, None, {}, copies=2)
    for handle in handles:
        handle.remove()
    every = {name: set(range(policy.model.get_submodule(f"{name}.experts").num_experts)) for name in seen}
    return {name: (min(few[name]), min(every[name] - each, default=None)) for name, each in seen.items()}


SLOT = (
    "s, = [manager.memory_pool.uid_to_buffer_id[k] for k, e in manager.lora_refs.items()"
    " if e.lora_name == 'policy-v1']\n"
    "taken, = take_adapters(manager, ('policy-v1',), copied=False)\n"
)
EXPERT_BUFFERS = {
    "w1.lora_A": "b[0].chunk(2, 1)[0]", "w3.lora_A": "b[0].chunk(2, 1)[1]", "w2.lora_A": "b[2]",
    "w1.lora_B": "b[1].chunk(2, 1)[0]", "w3.lora_B": "b[1].chunk(2, 1)[1]", "w2.lora_B": "b[3]",
}  # fmt: skip
"""Views of what SGLang multiplies by; `b` are the four buffers of a layer's experts."""
ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("w1", "w3"))
"""Layers with one rotation."""


def adapter_slices(policy: Policy, adapter: AdapterFiles) -> Iterator[Fault]:
    """Some rows of one factor of every adapted layer, or of its rotation, in the slot."""
    names = list(published_tensors(adapter.files))
    for name in names:
        module, _, kind = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        together = next((group for group in ONE_INPUT if last in group), (last,)) if kind == "oft_R" else (last,)
        if last != together[0]:
            continue
        layer, is_expert = module.partition(".experts.")[0], ".experts." in module
        if is_expert and kind != "oft_R":
            buffers = f"b = {{n: b for n, _, b in taken.slabs[s]}}['{layer}.experts']\n"
            held = f"{buffers}t = {EXPERT_BUFFERS[f'{last}.{kind}']}\n"
        else:
            held = f"t, = [p.data for p in _pieces(taken, taken.slabs[s], is_alone=True) if p.name == '{name}']\n"
        view = "t[..., :2, :2]"
        plant = f"{SLOT}{held}kept['v'] = {view}.clone()\n{view}.mul_(2)\n"
        heal = f"{SLOT}{held}{view}.copy_(kept['v'])\n"
        causes = tuple(each for each in (f"{parent}.{part}.{kind}" for part in together) if each in names)
        yield Fault("adapter slice", name, plant, heal, layer if is_expert else module, causes, is_adapters=True)


# --- the command ---


def main(models: list[str]) -> int:
    torch.set_num_threads(1)
    rows, wrong = [], []
    for model in models or MODELS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, start(model, Path(folder)) as bench:
            for adapted in (False, True):
                healthy = bench.compare(adapted=adapted)
                assert healthy.is_clear, healthy.sentence()
                assert not healthy.not_compared, healthy.not_compared
            planted: Counter[str] = Counter()
            named: Counter[str] = Counter()
            for fault in all_faults(bench):
                problem = bench.try_fault(fault)
                planted[fault.kind] += 1
                named[fault.kind] += not problem
                if problem:
                    wrong.append(problem)
                    print(f"{model}: {fault.kind} of {fault.name}: {problem}", flush=True)
            healthy = bench.compare(adapted=False)
            assert healthy.is_clear, f"a fault was not taken back: {healthy.sentence()}"
        rows += [(model, kind, planted[kind], named[kind]) for kind in planted]
        print(f"{model}: {named.total()} of {planted.total()} named, {time.monotonic() - began:.0f} s", flush=True)
    for row in rows:
        print("{:<16} {:<22} {:>4} planted {:>4} named".format(*row))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
