"""Prompts of DeepSeek-V4 as SGLang makes them; SGLang's own Python runs this file.

    PYTHON deepseek_v4_prompts.py ASKED.json

prints, for each request, `{"ids": [...], "text": "..."}`, and for each text what SGLang reads out of it as calls.

Belongs here: SGLang's functions, called. Does not belong here: any expectation.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.deepseekv4_detector import DeepSeekV4Detector
from sglang.srt.parser.deepseek_recipe_renderer import DeepSeekRecipe, load_deepseek_recipe, pre_normalize
from tokenizers import Tokenizer


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        asked = json.load(file)
    recipe = DeepSeekRecipe("dsv4", Tokenizer.from_file(asked["tokenizer"]))
    tools = [Tool(**tool) for tool in asked["tools"]]
    prompts = [prompt(recipe, body) for body in asked["bodies"]]
    calls = [
        [[call.name, json.loads(call.parameters)] for call in DeepSeekV4Detector().detect_and_parse(text, tools).calls]
        for text in asked["texts"]
    ]
    print(json.dumps({"prompts": prompts, "calls": calls}))


def prompt(recipe: DeepSeekRecipe, body: dict[str, Any]) -> dict[str, Any]:
    library = load_deepseek_recipe()
    request = library.ChatCompletionRequest(pre_normalize(body) | {"model": recipe.model})
    conversation = request.convert(library.ConversionOptions()).conversation
    text = library.DeepseekV4Encoding().render_conversation(conversation).prompt
    return {"ids": recipe.encode(body), "text": text}


if __name__ == "__main__":
    main()
