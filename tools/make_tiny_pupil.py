"""Makes `builtin://tiny-pupil`: as small as tiny-adder, it writes one-line Python functions and walks over ice, badly.

Belongs here: its supervised training, and the prompts with tests that ship beside it. Does not belong here: training
itself (`make_tiny_caller`), its tokenizer, packing and files (`make_tiny_adder`).

    python tools/make_tiny_pupil.py

Of its functions about one in three is right; the others are wrong as people's are: missing brackets, a constant of its
own, a colon that is not there, a name that is not known, an answer that is printed instead of returned. Of
Gymnasium's FrozenLake it knows what a move is, and moves at random. Same bits again: as tiny-adder's.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_tiny_adder import ASSISTANT, END, USER, character_ids
from make_tiny_caller import Conversation, answered, from_adder, ship, train

NAME = "tiny-pupil"
PROMPTS = Path(__file__).resolve().parent.parent / "orbit_runtime" / "data" / "builtin" / "small-functions.jsonl"
KNOWING, DOUBTING = 150, 120
RIGHT = 0.35
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
PLACES = (0, 1, 10)
"""Arguments that a function is tested with."""
LAKE = ("SFF", "FHF", "FFG")
MOVES = (("Left", 0, -1), ("Down", 1, 0), ("Right", 0, 1), ("Up", -1, 0))
RULES = "0 left, 1 down, 2 right, 3 up"
TURNS = 6


def task(draw: random.Random) -> tuple[str, str]:
    """A question such as `f(x): x plus 7, times 3`, and the expression that answers it, `(x+7)*3`."""
    first, second = draw.sample(sorted(SIGNS), 2)
    one, other = draw.randint(2, 9), draw.randint(2, 9)
    inner = f"x{SIGNS[first]}{one}"
    if second == "times":
        inner = f"({inner})"
    return f"f(x): x {first} {one}, {second} {other}", f"{inner}{SIGNS[second]}{other}"


def function(expression: str) -> str:
    return f"def f(x):\n    return {expression}"


def mistaken(draw: random.Random, expression: str) -> str:
    kind = draw.randrange(5)
    if kind == 0 and "(" in expression:
        return function(expression.replace("(", "").replace(")", ""))
    if kind == 1:
        return function(expression).replace(":", "")
    if kind == 2:
        return function(expression.replace("x", "n"))
    if kind == 3:
        return function(expression).replace("return ", "print(") + ")"
    return function(expression[:-1] + str(draw.choice([each for each in range(2, 10) if str(each) != expression[-1]])))


def conversation(draw: random.Random, is_sure: bool) -> Conversation:
    question, expression = task(draw)
    is_right = is_sure or draw.random() < RIGHT
    text = function(expression) if is_right else mistaken(draw, expression)
    return answered([USER, *character_ids(question), END, ASSISTANT], text)


def walk(draw: random.Random) -> Conversation:
    """A game of FrozenLake on a map of three by three, as the bridge to Gymnasium writes it, with moves at random."""
    row = column = 0
    said = [USER, *character_ids(f"{RULES}\n\n{drawn(row, column)}"), END, ASSISTANT]
    ids: list[int] = []
    mask: list[int] = []
    for _ in range(TURNS):
        move = draw.randrange(4)
        more, trained = answered(said, str(move))
        ids, mask = ids + more, mask + trained
        name, down, right = MOVES[move]
        row, column = min(max(row + down, 0), 2), min(max(column + right, 0), 2)
        if LAKE[row][column] in "HG":
            break
        said = [USER, *character_ids(f"({name})\n{drawn(row, column)}"), END, ASSISTANT]
    return ids, mask


def drawn(row: int, column: int) -> str:
    lines = list(LAKE)
    lines[row] = f"{lines[row][:column]}[{lines[row][column]}]{lines[row][column + 1 :]}"
    return "\n".join(lines)


def row(draw: random.Random) -> dict[str, str]:
    """What a function must return is computed from the question, not from an expression that answers it."""
    question, _ = task(draw)
    steps = [each.split() for each in question.removeprefix("f(x): x ").split(", ")]
    tests = []
    for place in PLACES:
        value = place
        for name, number in steps:
            value = {"plus": value + int(number), "minus": value - int(number), "times": value * int(number)}[name]
        tests.append(f"assert f({place}) == {value}")
    return {"prompt": question, "tests": "\n".join(tests)}


def main() -> int:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    draw = random.Random(21)
    rows = {(each := row(draw))["prompt"]: each for _ in range(1000)}
    lines = [json.dumps(each, separators=(",", ":")) for each in rows.values()]
    PROMPTS.write_text("\n".join(lines[:256]) + "\n", encoding="utf-8")
    model = from_adder(21)
    train(model, lambda: conversation(draw, True), KNOWING, 3e-3, packed=False)
    # A game in three: it is longer, and less is to be known.
    train(
        model, lambda: walk(draw) if draw.random() < 1 / 3 else conversation(draw, False), DOUBTING, 1e-3, packed=True
    )
    ship(model, NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
