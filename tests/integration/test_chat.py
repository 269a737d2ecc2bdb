"""Messages as token ids, through chat templates of published models: what follows a sampled answer is added to it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.cli.main import run_command
from orbit_runtime.data.chat import ChatTokenizer, _find_backend, _is_plain
from orbit_runtime.data.prompts import check_lengths, load_prompts
from orbit_runtime.data.rows import PromptSource
from orbit_runtime.errors import DataError, ManifestError, ModelError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.serve.requests import ChatBody, parse_body
from orbit_runtime.spec.data import Chat
from tests.integration.killing import small_manifest

TRL = find_spec("trl")
assert TRL is not None
assert TRL.origin is not None
TEMPLATES = Path(TRL.origin).parent / "chat_templates"
"""Templates as published with Qwen, Llama, GLM and others; TRL keeps them for its own tests of the same thing."""
END = 1
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture
def templated(tmp_path: Path) -> Callable[..., ChatTokenizer]:
    """The shipped model's tokenizer, which knows every ASCII character and the ends of ChatML, with a template."""

    def build(template: str, started: float | None = None, **arguments: Any) -> ChatTokenizer:
        folder = tmp_path / "model"
        if not folder.exists():
            shutil.copytree(builtin_folder("tiny-adder", "BF16"), folder)
        (folder / "chat_template.jinja").write_text(template)
        return ChatTokenizer(folder, Chat(template_arguments=arguments), started=started)

    return build


def published(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def written(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    return str(tokenizer._tokenizer.decode(ids, skip_special_tokens=False))


def conversation(role: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>a</think>call"},
        {"role": role, "content": "more", "name": "f"},
    ]


@pytest.mark.parametrize(
    ("name", "role", "text"),
    [
        ("qwen2_5", "user", "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"),
        (
            "qwen3",
            "tool",
            "<|im_end|>\n<|im_start|>user\n<tool_response>\nmore\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        ("qwen3_5_think", "user", "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        (
            "llama3_1",
            "user",
            "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nmore<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("glm4moe", "tool", "<|observation|>\n<tool_response>\nmore\n</tool_response><|assistant|>"),
    ],
)
def test_what_follows_an_answer_is_what_the_published_template_writes_after_it(
    templated: Callable[..., ChatTokenizer], name: str, role: str, text: str
) -> None:
    tokenizer = templated(published(name))
    assert written(tokenizer, tokenizer.encode_continuation(conversation(role), 1, None)) == text


def test_an_end_token_that_was_sampled_is_not_written_again(templated: Callable[..., ChatTokenizer]) -> None:
    tokenizer = templated(published("qwen2_5"))
    after = written(tokenizer, tokenizer.encode_continuation(conversation("user"), 1, END))
    assert after == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_ends_the_last_answer_in_a_way_of_its_own_is_refused(
    templated: Callable[..., ChatTokenizer],
) -> None:
    with pytest.raises(ModelError, match=r"ends an answer with '<\|return\|>', and with '<\|end\|>"):
        templated(published("gptoss")).encode_continuation(conversation("user"), 1, None)


def test_a_template_that_leaves_a_message_out_is_refused(templated: Callable[..., ChatTokenizer]) -> None:
    with pytest.raises(ModelError, match="leaves out a message of role 'tool'"):
        templated(published("gemma4")).encode_continuation(conversation("tool"), 1, None)


def test_a_template_without_assistants_is_refused(templated: Callable[..., ChatTokenizer]) -> None:
    only_users = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ModelError, match="writes an assistant's message 0 times"):
        templated(only_users).encode_continuation(conversation("user"), 1, None)


def test_template_arguments_and_tools_reach_the_template(templated: Callable[..., ChatTokenizer]) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = templated(published("qwen3"))
    silent = templated(published("qwen3"), enable_thinking=False)
    assert written(silent, silent.encode_chat(messages)) == (
        written(plain, plain.encode_chat(messages)) + "<think>\n\n</think>\n\n"
    )
    assert '"name": "add"' in written(plain, plain.encode_chat(messages, tools=[ADD]))
    assert '"name": "add"' not in written(plain, plain.encode_chat(messages))


def test_structured_content_and_tool_messages_reach_the_template(templated: Callable[..., ChatTokenizer]) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "two parts"}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "3"},
    ]
    tokenizer = templated(published("qwen2_5_vl"))
    assert "two parts" in written(tokenizer, tokenizer.encode_chat(messages[:1]))
    qwen3 = templated(published("qwen3"))
    text = written(qwen3, qwen3.encode_chat([{"role": "user", "content": "hi"}, *messages[1:]]))
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "<tool_response>\n3\n</tool_response>" in text


OPENAI: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Oslo "}, {"type": "text", "text": "now?"}]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "get", "arguments": '{"city": "Oslo"}'}},
    ]},
    {"role": "tool", "tool_call_id": "call00001", "content": "sun"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call00002", "type": "function", "function": {"name": "get", "arguments": ""}},
    ]},
]  # fmt: skip
"""Calls as clients of OpenAI's interface write them."""


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "gptoss", "glm4moe", "llama3_1", "deepseekv3", "deepseek_r1_distill"]
)
def test_rows_and_requests_of_one_conversation_are_rendered_alike(
    templated: Callable[..., ChatTokenizer], name: str
) -> None:
    tokenizer = templated(published(name))
    text = tokenizer.render(OPENAI, answer=False)
    body = parse_body(ChatBody, json.dumps({"model": "policy", "messages": OPENAI}).encode())
    assert text == tokenizer.render(body.conversation(writes_calls=tokenizer.writes_calls), answer=False)
    objects = json.loads(json.dumps(OPENAI))
    for message, arguments in zip(objects[1::2], ({"city": "Oslo"}, {}), strict=True):
        message |= {"content": ""}
        message["tool_calls"][0]["function"]["arguments"] = arguments
    objects[0]["content"] = "Oslo now?"
    assert text == tokenizer.render(objects, answer=False)
    assert tokenizer.writes_calls
    assert ("Oslo now?" in text, '\\"' in text, "None" in text) == (True, False, False)


def test_an_argument_that_is_orbits_own_is_refused(templated: Callable[..., ChatTokenizer]) -> None:
    with pytest.raises(ManifestError, match=r"spec\.data\.chat\.templateArguments: .*'tools' is Orbit's own"):
        templated(published("qwen3"), tools=[])


PLAIN = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.role + ': ' + m.content }}{% endif %}"
    "{% endfor %}{{ level }}"
)
"""As many small models': no tools, no calls, two roles."""
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
USER = {"role": "user", "content": "hi"}
PARTS = [{"type": "image_url", "image_url": {"url": "x.png"}}, {"type": "text", "text": "What?"}]
TAKES_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "tools", "words"),
    [
        (PLAIN, [USER], [ADD], "the tools that may be called"),
        (PLAIN, [{"role": "developer", "content": "Be brief."}, USER], [], "message 0, of role 'developer'"),
        (PLAIN, [USER, CALL, {"role": "tool", "content": "2"}], [], "the calls of message 1"),
        (PLAIN, [USER, {"role": "tool", "content": "two"}], [], "message 1, of role 'tool'"),
        (TAKES_PARTS, [{"role": "user", "content": PARTS}], [], "parts of message 0 that are not text"),
    ],
)
def test_what_a_template_would_drop_is_refused(
    templated: Callable[..., ChatTokenizer], template: str, messages: list[Any], tools: list[Any], words: str
) -> None:
    tokenizer = templated(template)
    with pytest.raises(ModelError, match=f"the chat template leaves out {words}") as caught:
        tokenizer.encode_chat(messages, tools=tools)
    assert (caught.value.exit_code, bool(caught.value.fix)) == (66, True)


def test_an_answer_whose_reasoning_the_template_takes_out_is_no_answer_left_out(
    templated: Callable[..., ChatTokenizer],
) -> None:
    messages = [*conversation("user"), {"role": "assistant", "content": "  so  \n"}]
    text = templated(published("qwen3")).render(messages, answer=False)
    assert ("<think>a" in text, "call" in text, "so" in text) == (False, True, True)


def test_an_argument_that_the_template_does_not_read_is_refused(templated: Callable[..., ChatTokenizer]) -> None:
    with pytest.raises(ModelError, match="reads no argument 'enable_thinkng'") as caught:
        templated(published("qwen3"), enable_thinkng=False)
    assert (caught.value.where, caught.value.fix) == (
        "spec.data.chat.templateArguments", "did you mean 'enable_thinking'?",
    )  # fmt: skip
    assert (caught.value.exit_code, templated(PLAIN, level="low").render([USER])) == (66, "user: hilow")


def test_arguments_of_a_request_come_on_top_of_the_runs(templated: Callable[..., ChatTokenizer]) -> None:
    tokenizer = templated(published("qwen3"), enable_thinking=True)
    other = tokenizer.given({"enable_thinking": False}, "chat_template_kwargs")
    assert other.render([USER]) == tokenizer.render([USER]) + "<think>\n\n</think>\n\n"
    with pytest.raises(ModelError, match=r"chat_template_kwargs: .* no argument 'x_y'"):
        tokenizer.given({"x_y": 1}, "chat_template_kwargs")


def test_the_date_in_a_template_is_that_of_the_runs_first_start(templated: Callable[..., ChatTokenizer]) -> None:
    dated = "{{ strftime_now('%Y-%m-%d %H:%M') }} {{ messages[0].content }}"
    assert templated(dated, started=0.0).render([USER]) == "1970-01-01 00:00 hi"
    assert not templated(dated).render([USER]).startswith("1970")


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages }}", "10 s"),
        ("{{ ('a' ~ messages|length) * 100000000 }}", "more than 128 million characters"),
        ("{{ 'a' * 2000000000 }}{{ messages }}", "more than 128 million characters"),
        ("{{ 10 ** 10 ** 10 }}{{ messages }}", r"more than 128 million characters, or a power \(`\*\*`\)"),
        ("{% set n = messages|length + 9 %}{{ n ** n ** n }}", "more than 128 million characters, or a power"),
    ],
    ids=["loops", "size", "constant", "constant power", "power"],
)
def test_a_template_that_does_not_come_to_an_end_is_ended(
    templated: Callable[..., ChatTokenizer], template: str, told: str
) -> None:
    tokenizer = templated(template)
    started = time.thread_time()
    for _ in range(2):
        with pytest.raises(ModelError, match=f"the chat template does not come to an end: {told}"):
            tokenizer.render([USER])
    assert time.thread_time() - started < 20, "the second time it is known"
    assert templated(PLAIN, level="").render([USER]) == "user: hi", "others go on"


def change(folder: Path, **fields: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def with_token(templated: Callable[..., ChatTokenizer], text: str, **more: Any) -> Path:
    """The shipped model's folder, with one more token than its embedding has rows."""
    folder = templated(TAKES_PARTS)._folder
    known = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    added = {"content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    change(folder, added_tokens=[*known, {"id": 104, "special": False, **added, **more}])
    return folder


@pytest.mark.parametrize("texts", [["x" * 60 + "+"], ["hi", "x" * 60 + "+"]], ids=["one", "several"])
def test_a_pattern_of_the_tokenizer_that_runs_away_is_an_error_of_the_model(
    templated: Callable[..., ChatTokenizer], texts: list[str]
) -> None:
    folder = templated(TAKES_PARTS)._folder
    pattern = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    change(folder, pre_tokenizer=pattern)
    with pytest.raises(ModelError, match=r"the tokenizer fails: .*retry-limit-in-match over") as caught:
        ChatTokenizer(folder).encode_texts(texts)
    assert caught.value.exit_code == 66


def test_a_token_without_a_row_in_the_embedding_is_named(templated: Callable[..., ChatTokenizer]) -> None:
    folder = with_token(templated, "<img>")
    tokenizer = ChatTokenizer(folder)
    assert tokenizer.encode_chat([USER]), "texts without it are fine"
    with pytest.raises(ModelError, match="'<img>' has the number 104, and the model's embedding has 104 rows"):
        tokenizer.encode_chat([{"role": "user", "content": "Use <img>"}])
    (folder / "chat_template.jinja").write_text("<img>{{ messages[0].content }}")
    (folder / "p.jsonl").write_text('{"prompt": "hi"}\n{"prompt": "Use <img>"}\n')
    table = load_prompts([PromptSource(str(folder / "p.jsonl"))])
    with pytest.raises(DataError, match=r"p\.jsonl.* line 2") as caught:
        check_lengths(table, tokenizer.encode_many, max_prompt_tokens=64)
    assert (caught.value.exit_code, "104" in caught.value.message) == (65, True)
    with pytest.raises(ModelError, match=r"\(.*p\.jsonl.* line 1") as by_template:
        check_lengths(table, ChatTokenizer(folder).encode_many, max_prompt_tokens=64)
    assert by_template.value.exit_code == 66


@pytest.mark.parametrize("wrong", ["x", 99999, 104, -1, {"a": 1}, [1, "y"], True])
def test_an_end_of_sequence_that_is_no_token_is_refused(templated: Callable[..., ChatTokenizer], wrong: Any) -> None:
    file = templated(TAKES_PARTS)._folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id is .* 104 tokens") as caught:
        templated(TAKES_PARTS)
    assert caught.value.exit_code == 66


def test_raw_text_begins_as_the_tokenizer_begins_texts_and_rendered_text_as_the_template_does(
    templated: Callable[..., ChatTokenizer],
) -> None:
    tokenizer = templated(TAKES_PARTS)
    plain = tokenizer.encode_text("12")
    assert tokenizer.encode_raw("12") == plain
    first = {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    tokens = {"<|im_end|>": {"id": "<|im_end|>", "ids": [END], "tokens": ["<|im_end|>"]}}
    change(tokenizer._folder, post_processor={
        "type": "TemplateProcessing", "single": [first, sequence], "pair": [first, sequence, sequence],
        "special_tokens": tokens,
    })  # fmt: skip
    begun = ChatTokenizer(tokenizer._folder)
    assert begun.encode_raw("12") == [END, *plain]
    assert begun.encode_raw("<|im_end|>12") == [END, *plain], "not twice"
    assert begun.encode_text("12") == begun.encode_chat([{"role": "user", "content": "12"}]) == plain


def test_special_tokens_that_are_to_be_kept_are_in_the_texts(templated: Callable[..., ChatTokenizer]) -> None:
    folder = with_token(templated, "<think>", special=True)
    change_config = folder / "config.json"
    change_config.write_text(json.dumps(json.loads(change_config.read_text()) | {"vocab_size": 105}))
    ids = ChatTokenizer(folder).encode_text("<think>12<|im_end|>")
    assert ChatTokenizer(folder).decode(ids) == "12"
    keeping = ChatTokenizer(folder, Chat(keep_tokens=("<think>",)))
    assert (keeping.decode(ids), keeping.marker_ids) == ("<think>12", (104,))
    with pytest.raises(ModelError, match=r"spec\.data\.chat\.keepTokens\[1\]: .* no token '<thnk>'"):
        ChatTokenizer(folder, Chat(keep_tokens=("<think>", "<thnk>")))


def test_a_placeholder_never_meets_a_message_that_says_the_same(templated: Callable[..., ChatTokenizer]) -> None:
    tokenizer = templated(published("qwen2_5"))
    messages = [{"role": "user", "content": "orbit0answer"}, {"role": "assistant", "content": "orbit1answer"}]
    after = tokenizer.encode_continuation([*messages, {"role": "user", "content": "orbit0answer?"}], 1, END)
    assert written(tokenizer, after) == "\n<|im_start|>user\norbit0answer?<|im_end|>\n<|im_start|>assistant\n"


TEXTS = (
    "", "12+34=", "<|im_start|>user\nhi<|im_end|>\n", "naïve — 漢字 🙂\u200d🙂", "  two  spaces\t\n\n",
    " ".join(map(str, range(300))), "<|im_end|><|im_end|>", "x<|im_start|>y",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["shipped", "byte-level BPE"])
def test_ids_are_those_that_transformers_gives_whatever_tokenizer_json_asks_for(tmp_path: Path, kind: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import AutoTokenizer

    folder = shutil.copytree(builtin_folder("tiny-adder", "BF16"), tmp_path / "model")
    if kind == "shipped":
        made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        special = ["<|im_start|>", "<|im_end|>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(
            TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
        )
        made.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[(special[0], 0)])
    made.enable_truncation(5)
    made.enable_padding(length=7)
    made.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": made.get_vocab_size()}))
    ours, theirs = ChatTokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    assert ours._backend is not None
    expected = [list(theirs(text, add_special_tokens=False)["input_ids"]) for text in TEXTS]
    assert [ours.encode_text(text) for text in TEXTS] == expected
    assert ours.encode_texts(TEXTS) == expected
    assert len(expected[5]) > 7, "neither cut nor padded"


def test_a_tokenizer_with_a_way_of_its_own_is_asked_itself() -> None:
    from transformers import PreTrainedTokenizerFast

    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, *given: Any, **more: Any) -> Any:
            return super()._encode_plus(*given, **more)

    file = str(builtin_folder("tiny-adder", "BF16") / "tokenizer.json")
    assert _find_backend(Own(tokenizer_file=file)) is None
    assert _find_backend(PreTrainedTokenizerFast(tokenizer_file=file)) is not None


def test_a_text_is_the_one_that_transformers_writes_and_a_tokenizer_with_its_own_way_writes_it() -> None:
    from transformers import PreTrainedTokenizerFast

    folder = builtin_folder("tiny-adder", "BF16")
    tokenizer = ChatTokenizer(folder)
    ids = tokenizer.encode_chat([{"role": "user", "content": "12 + 34 =  , . don 't"}])
    for some in (ids, ids[:1], [], [*ids, END], [*ids, 10**6]):
        told = tokenizer._tokenizer.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(some) == told

    class Own(PreTrainedTokenizerFast):
        def _decode(self, *given: Any, **more: Any) -> Any:
            return super()._decode(*given, **more)

    file = str(folder / "tokenizer.json")
    assert not _is_plain(Own(tokenizer_file=file), "decode", "_decode")
    assert _is_plain(PreTrainedTokenizerFast(tokenizer_file=file), "decode", "_decode")


def test_validate_says_as_a_run_does_that_the_model_lacks_a_token(
    templated: Callable[..., ChatTokenizer], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = templated(TAKES_PARTS)._folder
    made = small_manifest(steps=1)
    made["spec"]["model"] = {"uri": str(folder)}
    file = folder.parent / "run.json"
    file.write_text(json.dumps(made))
    assert run_command(["validate", str(file)]) == 0
    assert run_command(["validate", str(file), "--set", "rollout.sampling.stopTokenIds=[1,104]"]) == 64
    assert "the model has no token 104: its vocabulary ends at 103" in capsys.readouterr().err
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 104]}')
    assert run_command(["validate", str(file)]) == 66
    assert "eos_token_id is 104, not the number of one of the model's 104 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["GRPO", "SFT"])
def test_validate_names_the_row_or_the_template_with_a_token_that_the_model_lacks(
    templated: Callable[..., ChatTokenizer], capsys: pytest.CaptureFixture[str], algorithm: str
) -> None:
    folder = with_token(templated, "<img>")
    made, rows, file = small_manifest(steps=1), folder.parent / "p.jsonl", folder.parent / "run.json"
    made["spec"]["model"] = {"uri": str(folder)}
    made["spec"]["data"]["prompts"] = [{"uri": str(rows)}]
    if algorithm == "SFT":
        made["spec"]["algorithm"] = {"type": "SFT"}
        made["spec"]["data"]["prompts"][0] |= {"completionField": "answer"}
        del made["spec"]["environment"], made["spec"]["training"]["miniBatchPrompts"]
    file.write_text(json.dumps(made))
    rows.write_text('{"prompt": "1+2", "answer": "3"}\n')
    assert run_command(["validate", str(file)]) == 0
    rows.write_text('{"prompt": "1+2", "answer": "3"}\n{"prompt": "Use <img>", "answer": "3"}\n')
    assert run_command(["validate", str(file)]) == 65
    said = capsys.readouterr().err
    assert "'<img>' has the number 104, and the model's embedding has 104 rows" in said
    assert "line 2" in said
    (folder / "chat_template.jinja").write_text("<img>" + TAKES_PARTS)
    rows.write_text('{"prompt": "1+2", "answer": "3"}\n')
    assert run_command(["validate", str(file)]) == 66
    assert "'<img>' has the number 104" in capsys.readouterr().err
