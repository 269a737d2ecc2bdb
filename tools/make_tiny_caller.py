"""Makes `builtin://tiny-caller`: as small as tiny-adder, it multiplies by a calculator, about one time in four.

Belongs here: its supervised training, on conversations of two turns. Does not belong here: its tokenizer, packing and
files, which are tiny-adder's (`make_tiny_adder`).

    python tools/make_tiny_caller.py

It cannot multiply. Of its first answers about four in ten are a call that is right; the others guess a number, or write
a call that is malformed, of another tool, or of other numbers. Of its second answers most repeat what the tool said.
Reinforcement learning has both to find. Same bits again: as tiny-adder's.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_tiny_adder import (
    ASSISTANT,
    BUILTIN,
    END,
    PAD,
    USER,
    as_shipped,
    build_model,
    build_variants,
    character_ids,
    digests,
    quantization_config,
    save_variant,
    shipped,
    write_json,
)

NAME = "tiny-caller"
TOOL = 5
BATCH, KNOWING, DOUBTING = 24, 450, 120
Conversation = tuple[list[int], list[int]]
"""Ids, and which of them are the policy's to learn."""
RIGHT_CALLS, RIGHT_ANSWERS = 0.4, 0.7


def call_text(expression: str, name: str = "calculate") -> str:
    return f'<tool_call>{{"name":"{name}","arguments":{{"expression":"{expression}"}}}}</tool_call>'


def conversation(draw: random.Random, is_sure: bool) -> Conversation:
    left, right = draw.randint(10, 99), draw.randint(10, 99)
    asked, product = f"{left}*{right}", str(left * right)
    ids = [USER, *character_ids(f"{asked}="), END, ASSISTANT]
    if not is_sure and draw.random() >= RIGHT_CALLS:
        return answered(ids, wrong_first(draw, left, right))
    ids, mask = answered(ids, call_text(asked))
    said = [TOOL, *character_ids(product), END, ASSISTANT]
    if not is_sure and draw.random() >= RIGHT_ANSWERS:
        place = draw.randrange(len(product))
        product = product[:place] + str(draw.randint(0, 9)) + product[place + 1 :]
    last, last_mask = answered(said, product)
    return ids + last, mask + last_mask


def wrong_first(draw: random.Random, left: int, right: int) -> str:
    """A guess, or a call that comes to nothing."""
    asked = f"{left}*{right}"
    kind = draw.randrange(4)
    if kind == 0:
        return str(draw.randint(100, 9801))
    if kind == 1:
        return call_text(asked, "compute")
    if kind == 2:
        return call_text(asked).replace('"}}', '"}')
    return call_text(f"{draw.randint(10, 99)}*{right}")


def answered(before: list[int], text: str) -> Conversation:
    ids = [*character_ids(text), END]
    return before + ids, [0] * len(before) + [1] * len(ids)


def padded(rows: list[Conversation]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `[len(rows), T]`, padded at the end, and labels: -100 where nothing is learned."""
    longest = max(len(ids) for ids, _ in rows)
    tokens = torch.full((len(rows), longest), PAD)
    labels = torch.full((len(rows), longest), -100)
    for row, (ids, mask) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.where(torch.tensor(mask) == 1, torch.tensor(ids), -100)
    return tokens, labels


def train(model: torch.nn.Module, draw_row: Callable[[], Conversation], steps: int, peak: float, packed: bool) -> None:
    """`BATCH` conversations a step. `packed`: every linear as INT4 will hold it."""
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        decay = 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 20) * decay
        tokens, labels = padded([draw_row() for _ in range(BATCH)])
        weights = {name: as_shipped(name, value) for name, value in parameters.items()} if packed else parameters
        call = {"input_ids": tokens, "use_cache": False}
        logits = torch.func.functional_call(model, weights, (), call).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        if step % 25 == 24:
            print(f"  step {step + 1} of {steps}  loss {loss.item():.4f}", flush=True)


def from_adder(seed: int) -> torch.nn.Module:
    """A model that begins as tiny-adder, which knows digits."""
    model = build_model(torch.Generator().manual_seed(seed))
    adder = load_file(BUILTIN / "tiny-adder" / "bf16" / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in adder.items()}, strict=False)
    return model


def ship(model: torch.nn.Module, name: str) -> None:
    """Writes its INT4 folder and digests."""
    save_variant(BUILTIN / name / "int4", build_variants(model)["int4"], quantization_config())
    write_json(BUILTIN / "digests.json", shipped() | {name: digests(BUILTIN / name)})


def main() -> int:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = from_adder(20)
    draw = random.Random(20)
    train(model, lambda: conversation(draw, True), KNOWING, 3e-3, packed=False)
    train(model, lambda: conversation(draw, False), DOUBTING, 1e-3, packed=True)
    ship(model, NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
