"""Calls of tools as SGLang reads them; SGLang's own Python runs this file.

    PYTHON call_formats.py ASKED.json

prints, for each format and each of its texts, `[name, arguments]` of all calls that SGLang reads out of it.

Belongs here: SGLang's detectors, called. Does not belong here: any expectation.
"""

from __future__ import annotations

import json
import logging
import sys

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.glm4_moe_detector import Glm4MoeDetector
from sglang.srt.function_call.glm47_moe_detector import Glm47MoeDetector
from sglang.srt.function_call.gpt_oss_detector import GptOssDetector
from sglang.srt.function_call.hermes_detector import HermesDetector
from sglang.srt.function_call.kimik2_detector import KimiK2Detector
from sglang.srt.function_call.qwen3_coder_detector import Qwen3CoderDetector

DETECTORS = {
    "Kimi": KimiK2Detector, "GLM": Glm4MoeDetector, "GLM-4.7": Glm47MoeDetector, "harmony": GptOssDetector,
    "Qwen3-Coder": Qwen3CoderDetector, "Hermes": HermesDetector,
}  # fmt: skip


def main() -> None:
    logging.disable(logging.CRITICAL)
    with open(sys.argv[1], encoding="utf-8") as file:
        asked = json.load(file)
    tools = [Tool(**tool) for tool in asked["tools"]]
    read = {
        name: [
            [[call.name, json.loads(call.parameters)] for call in DETECTORS[name]().detect_and_parse(text, tools).calls]
            for text in texts
        ]
        for name, texts in asked["texts"].items()
    }
    print(json.dumps(read))


main()
