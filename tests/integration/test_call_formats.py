"""Episodes with tools in the format of each family: the completion's tokens become calls, and the results stand where
the family's own chat template puts them, behind exactly the tokens that were sampled."""

from __future__ import annotations

import asyncio
import json
import shutil
from array import array
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.environments.episodes import EpisodeLimits, EpisodeSettings, FinishedEpisode
from orbit_runtime.environments.tool_calls import parameter_schemas
from orbit_runtime.environments.turns import MultiTurn, ToolUse
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.rollout.requests import answer_text
from orbit_runtime.serve.answers import ChoicePart, ResponseForm
from orbit_runtime.serve.requests import ChatBody, parse_body
from orbit_runtime.types import FLOATS, TOKENS, Completion, Prompt, Sampling
from orbit_runtime.workers.user_code.environment_protocol import ToolResult
from orbit_runtime.workers.user_code.reward_pool import RewardThreads
from orbit_runtime.workers.user_code.reward_protocol import RewardTarget
from tests.integration.tiny_kimi import TEMPLATE as KIMI

TRL = find_spec("trl")
assert TRL is not None
assert TRL.origin is not None
PUBLISHED = Path(TRL.origin).parent / "chat_templates"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["a"],
        },
    },
}
IM = ["<|im_start|>", "<|im_end|>"]
GLM = ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|endoftext|>"]
KIMI_TOKENS = [
    "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
]  # fmt: skip
HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"]


def model(folder: Path, template: str, special: Sequence[str], ends: Sequence[str]) -> ChatTokenizer:
    """A tokenizer of characters with these special tokens, all of which a decoder leaves out."""
    shutil.copytree(builtin_folder("tiny-adder", "BF16"), folder)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in special])
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    ids = [made.token_to_id(each) for each in ends]
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        kept = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(kept | {"eos_token_id": ids, "vocab_size": made.get_vocab_size()}))
    return ChatTokenizer(folder)


class Adds:
    """The pool of one tool, which adds 1."""

    tools = (ADD,)

    def __init__(self) -> None:
        self.made: list[tuple[str, Mapping[str, Any]]] = []

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        self.made.append((name, arguments))
        return ToolResult(str(arguments["a"] + 1))


class Says:
    """An engine whose completions are these texts, as tokens."""

    def __init__(self, tokenizer: ChatTokenizer, *texts: str) -> None:
        self.tokenizer, self.texts = tokenizer, [*texts]
        self.prompts: list[str] = []

    async def sample(self, prompt_ids_T: Sequence[int], sampling: Sampling, *, key: int) -> Completion:
        self.prompts.append(self.tokenizer.decode_all(prompt_ids_T))
        ids = array(TOKENS, self.tokenizer.encode_text(self.texts.pop(0)))
        text = answer_text(self.tokenizer, ids, sampling)
        return Completion(0, ids, array(FLOATS, [-0.5] * len(ids)), array(TOKENS, [0] * len(ids)), "stop", text)


def play(tokenizer: ChatTokenizer, engine: Says, pool: Adds) -> FinishedEpisode:
    settings = EpisodeSettings("run", Sampling(max_new_tokens=2048), EpisodeLimits(context=1 << 14), 1, 0, False)
    scorer = RewardThreads([RewardTarget("one", lambda *_: 1.0)])
    opponent = lambda: ToolUse(pool, tokenizer.call_format)  # type: ignore[arg-type]  # noqa: E731
    environment = MultiTurn(settings, tokenizer, scorer, {"one": 1.0}, opponent)
    (episode,) = environment.build_episodes([Prompt("p", 0, ({"role": "user", "content": "1+1?"},), {})], 0)
    return asyncio.run(environment.play(episode, engine))


def harmony_call(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to={name} <|constrain|>json<|message|>{arguments}<|call|>"


def kimi_call(number: int, name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def kimi_section(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|><|im_end|>"


def coder_call(name: str, value: str) -> str:
    return f"<tool_call>\n<function={name}>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call><|im_end|>"


def glm_call(name: str, value: str) -> str:
    return f"<tool_call>{name}\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call><|observation|>"


QWEN_END = "\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
UNKNOWN = "Error: no tool is called 'sub'; there are: add"
FAMILIES = {
    "Kimi": (
        KIMI, KIMI_TOKENS, ["<|im_end|>"],
        ("so " + kimi_section(kimi_call(0, "add", '{"a": 1}'), kimi_call(1, "sub", "{}")),
         kimi_section(kimi_call(2, "add", '{"a": 2}')), "3<|im_end|>"),
        ("<|im_system|>add<|im_middle|>## Return of functions.add:0\n2<|im_end|>"
         f"<|im_system|>sub<|im_middle|>## Return of functions.sub:1\n{UNKNOWN}<|im_end|>"
         "<|im_assistant|>assistant<|im_middle|><think></think>",
         "<|im_system|>add<|im_middle|>## Return of functions.add:2\n3<|im_end|>"
         "<|im_assistant|>assistant<|im_middle|><think></think>"),
    ),
    "GLM": (
        (PUBLISHED / "glm4moe.jinja").read_text(), GLM, ["<|endoftext|>", "<|user|>", "<|observation|>"],
        (f"\n<think>hm</think>\n{glm_call('add', '1')}", glm_call("sub", "1"), "\n2<|user|>"),
        ("\n<tool_response>\n2\n</tool_response><|assistant|>",
         f"\n<tool_response>\n{UNKNOWN}\n</tool_response><|assistant|>"),
    ),
    "Qwen3-Coder": (
        (PUBLISHED / "qwen3_5_think.jinja").read_text(), IM, ["<|im_end|>"],
        (f"hm\n</think>\n\n{coder_call('add', '1')}", coder_call("sub", "1"), "2<|im_end|>"),
        (f"\n<|im_start|>user\n<tool_response>\n2{QWEN_END}",
         f"\n<|im_start|>user\n<tool_response>\n{UNKNOWN}{QWEN_END}"),
    ),
    "harmony": (
        (PUBLISHED / "gptoss.jinja").read_text(), HARMONY, ["<|return|>"],
        ("<|channel|>analysis<|message|>I add.<|end|><|start|>assistant" + harmony_call("functions.add", '{"a": 1}'),
         " to=functions.sub<|channel|>commentary json<|message|>{}<|call|>",
         "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>"),
        ('<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant',
         f'<|start|>functions.sub to=assistant<|channel|>commentary<|message|>"{UNKNOWN}"<|end|><|start|>assistant'),
    ),
    "Hermes": (
        (PUBLISHED / "qwen3.jinja").read_text(), IM, ["<|im_end|>"],
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>', "2<|im_end|>"),
        ("\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_made_and_its_result_stands_where_the_familys_template_puts_it(tmp_path: Path, family: str) -> None:
    template, special, ends, says, given = FAMILIES[family]
    tokenizer = model(tmp_path / "model", template, special, ends)
    assert tokenizer.call_format == family
    engine, pool = Says(tokenizer, *says), Adds()
    rollout = play(tokenizer, engine, pool).rollout
    assert rollout.outcome == "value"
    assert {name for name, _ in pool.made} == {"add"}
    assert pool.made[0] == ("add", {"a": 1})
    first = engine.prompts[0]
    expected = first
    for said, between in zip(says, given, strict=False):
        expected += said + between
    assert engine.prompts[-1] == expected
    assert len(engine.prompts) == len(says)
    trained = [token for token, flag in zip(rollout.token_ids_T, rollout.loss_mask_T, strict=True) if flag]
    assert tokenizer.decode_all(trained) == "".join(says), "what was sampled, and nothing else"
    assert rollout.counts["tool_errors"] == (family != "Hermes")


def test_the_token_that_ends_a_call_of_gpt_oss_ends_a_completion(tmp_path: Path) -> None:
    tokenizer = model(tmp_path / "model", (PUBLISHED / "gptoss.jinja").read_text(), HARMONY, ["<|return|>"])
    assert [tokenizer.text_of(each) for each in tokenizer.eos_ids][-1] == "<|call|>"
    assert tokenizer.text_of(tokenizer.eos_ids[0]) == "<|return|>"
    again = model(tmp_path / "again", (PUBLISHED / "gptoss.jinja").read_text(), HARMONY, ["<|return|>", "<|call|>"])
    assert sorted(again.eos_ids) == sorted(tokenizer.eos_ids), "named once"


def test_a_call_that_a_stop_string_cut_off_gets_the_token_that_ends_it(tmp_path: Path) -> None:
    tokenizer = model(tmp_path / "model", (PUBLISHED / "gptoss.jinja").read_text(), HARMONY, ["<|return|>"])
    said = harmony_call("functions.add", "{}").removesuffix("<|call|>")
    messages = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": said},
        {"role": "tool", "content": "é\n“x”"},
    ]  # fmt: skip
    after = tokenizer.decode_all(tokenizer.encode_continuation(messages, 1, None, tools=[ADD]))
    assert after.startswith("<|call|><|start|>functions.add to=assistant")
    for end in tokenizer.eos_ids:
        ended = tokenizer.decode_all(tokenizer.encode_continuation(messages, 1, end, tools=[ADD]))
        assert ended == after.removeprefix("<|call|>"), "whichever token the policy ended it with"


@pytest.mark.parametrize("family", ["Kimi", "harmony"])
def test_calls_that_a_client_sends_back_are_what_the_policy_wrote(tmp_path: Path, family: str) -> None:
    """What `orbit serve` made of a completion, as messages, becomes the same text again."""
    template, special, ends, says, given = FAMILIES[family]
    tokenizer = model(tmp_path / "model", template, special, ends)
    text = answer_text(tokenizer, tokenizer.encode_text(says[0]), Sampling())
    ids = array(TOKENS, tokenizer.encode_text(says[0]))
    form = ResponseForm(True, "policy", tokenizer, "policy@0", False, parameter_schemas([ADD]))
    part = ChoicePart(0, ids, array(FLOATS, [-1.0] * len(ids)), "stop", text.replace("functions.sub", "functions.add"))
    (choice,) = form.whole([part], prompt_tokens=3)["choices"]
    answer = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["add"] * (2 if family == "Kimi" else 1)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "2"} for call in answer["tool_calls"]]
    asked = {"model": "policy", "messages": [{"role": "user", "content": "1+1?"}, answer, *results], "tools": [ADD]}
    body = parse_body(ChatBody, json.dumps(asked).encode())
    assert tokenizer.writes_calls
    written = tokenizer.render(body.conversation(writes_calls=True), [ADD])
    if family == "Kimi":
        assert says[0].removeprefix("so ").replace("functions.sub", "functions.add") in written
        assert "## Return of functions.add:0\n2<|im_end|>" in written
        assert [call["id"] for call in answer["tool_calls"]] == ["functions.add:0", "functions.add:1"]
    else:
        call = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        assert f"<|channel|>analysis<|message|>I add.<|end|>{call}{given[0]}" in written


def test_an_answer_in_channels_is_read_back_by_its_template(tmp_path: Path) -> None:
    tokenizer = model(tmp_path / "model", (PUBLISHED / "gptoss.jinja").read_text(), HARMONY, ["<|return|>"])
    said = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>2"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    assert tokenizer.render(messages, answer=False).endswith(f"<|start|>assistant{said}<|return|>")
    again = tokenizer.render([*messages, {"role": "user", "content": "more"}])
    assert again.endswith("final<|message|>2<|end|><|start|>user<|message|>more<|end|><|start|>assistant")
    assert "so" not in again.partition("?")[2], "the template leaves reasoning of earlier answers out"


def test_text_without_calls_leaves_out_other_special_tokens(tmp_path: Path) -> None:
    tokenizer = model(tmp_path / "model", KIMI, KIMI_TOKENS, ["<|im_end|>"])
    ids = tokenizer.encode_text("a<|im_user|>b<|tool_call_begin|><|tool_call_end|>c<|im_end|>")
    assert tokenizer.decode(ids) == "ab<|tool_call_begin|><|tool_call_end|>c"
    assert [tokenizer.text_of(each) for each in tokenizer.marker_ids] == KIMI_TOKENS[5:]
