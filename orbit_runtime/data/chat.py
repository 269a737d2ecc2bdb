"""Converts chat messages to token ids and back, with the tokenizer in the model's folder.

Belongs here: the only place that loads a transformers tokenizer, always from local files and without executing code
from them. Does not belong here: which prompts there are.
"""

from __future__ import annotations

import copy
import ctypes
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from typing import Any

from orbit_runtime.data.scan import MAX_ROW
from orbit_runtime.data.tiktoken_model import VOCABULARY, is_tiktoken, load_tiktoken
from orbit_runtime.data.typescript import NotWritable, sorted_keys, write_tools
from orbit_runtime.errors import DataError, ManifestError, ModelError, OrbitError
from orbit_runtime.model_info.builtin_models import ROOT as BUILTIN
from orbit_runtime.model_info.calls.formats import format_of
from orbit_runtime.model_info.content import FILES
from orbit_runtime.model_info.module_tree import language_part
from orbit_runtime.model_info.settings import check_folder, load_settings, own_template
from orbit_runtime.spec.data import Chat

Messages = Sequence[Mapping[str, Any]]
"""Chat messages: `role`, `content`, and other fields that the template reads, such as `tool_calls`."""
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions, as chat templates take them."""

OWN_ARGUMENTS = ("add_generation_prompt", "conversation", "messages", "tokenize", "tools")
TOOLS_AS_TEXT = "tools_ts_str"
PROBE = "orbit_probe"
CALL_FORMS: tuple[tuple[str | None, Any], ...] = (("", {}), (None, {}), ("", "{}"), (None, "{}"))
"""Forms in which templates take the content beside a call and the call's arguments, the usual one first."""
ARGUMENTS = "spec.data.chat.templateArguments"
ROLES_FIX = "use a template that writes it, or roles that this one knows"
TOOLS_FIX = (
    "put a template that writes them into the model's folder as chat_template.jinja, or describe the tools in a "
    "message, in an environment of your own"
)
TEMPLATE_SECONDS = 10.0
"""Most processor time that a chat template may take for one conversation; published ones take milliseconds."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", VOCABULARY, "vocab.json", "tokenizer_config.json")
SAMPLE = "It's 20261129:\n\n  x  = été(12+34)\t<a_b>"
"""A text that rules of different models cut differently."""
_warn_once = cache(logging.getLogger("orbit.data").warning)
"""One model's tokenizer is loaded several times in a run."""


class NoEmbedding(ModelError):
    """A text holds a token for which the model has no embedding. `token`: the token's text."""

    def __init__(self, token: str, number: int, rows: int, folder: Path) -> None:
        self.token = token
        super().__init__(
            f"the token {token!r} has the number {number}, and the model's embedding has {rows} rows",
            where=str(folder),
            fix="use the tokenizer that the model was trained with, or a model that was resized to this one",
        )


def blamed(error: ModelError, messages: Messages, place: str) -> OrbitError:
    """An error about one row of the data, with its place: a `DataError` where the row itself holds the token that the
    model lacks."""
    token = error.token if isinstance(error, NoEmbedding) else None
    if token is not None and token in json.dumps([*map(dict, messages)], ensure_ascii=False, default=str):
        return DataError(error.message, where=place, fix="leave the token out, or use a model that has it")
    error.message = f"{error.message} ({place})"
    return error


class ChatTokenizer:
    """A model's own tokenizer and chat template.

    Args:
        chat: arguments of the template besides the messages, such as `enable_thinking`; special tokens to keep.
        started: seconds since 1970 that the template takes for now, in UTC; None for the clock of this machine.

    Raises:
        ManifestError: a template's argument is one that is always set.
        ModelError: the folder holds no tokenizer, no chat template, or names no end-of-sequence token; a token or an
            argument is unknown to it.
    """

    def __init__(self, folder: str | Path, chat: Chat | None = None, *, started: float | None = None) -> None:
        self._folder, chat = Path(folder), chat or Chat()
        self._tokenizer = _load_tokenizer(self._folder)
        self._backend = _find_backend(self._tokenizer)
        # The Rust tokenizer, where transformers adds nothing to its texts: a stream decodes twice for each token.
        self._decoder = self._tokenizer.backend_tokenizer if _is_plain(self._tokenizer, "decode", "_decode") else None
        self._calls = format_of(str(self._tokenizer.chat_template))
        self.call_format = self._calls.name if self._calls else ""
        """Name of the format in which the chat template writes calls of tools; empty if it is none that is known."""
        special = {each.content: token for token, each in self._tokenizer.added_tokens_decoder.items() if each.special}
        markers, ends = (self._calls.markers, self._calls.ends) if self._calls else ((), ())
        vocabulary = self._tokenizer.get_vocab()
        for index, name in enumerate(chat.keep_tokens):
            if name not in vocabulary:
                where, fix = f"spec.data.chat.keepTokens[{index}]", "name one of the model's tokens, as it is written"
                raise ModelError(f"the tokenizer has no token {name!r}", where=where, fix=fix)
        self._markers = {special[name]: name for name in (*markers, *chat.keep_tokens) if name in special}
        self.marker_ids = tuple(self._markers)
        """Special tokens that `decode` writes out, because calls of tools consist of them."""
        self._rows = _embedding_rows(self._folder)
        self._has_more = self._rows is not None and max(vocabulary.values(), default=0) >= self._rows
        eos_ids = _resolve_eos_ids(self._folder, self._tokenizer)
        self.eos_ids = tuple(dict.fromkeys([*eos_ids, *(special[end] for end in ends if end in special)]))
        """Tokens that end a completion: those of generation_config.json, config.json and the tokenizer, in this order,
        and then those that end it by calling a tool.
        """
        self._template_arguments: dict[str, Any] = {}
        self._runs_away: ModelError | None = None
        then = None if started is None else time.gmtime(started)
        self._clock = {} if then is None else {"strftime_now": lambda form: time.strftime(form, then)}
        self._texts: dict[int, str] = {}
        self._give(chat.template_arguments, ARGUMENTS)

    def _give(self, arguments: Mapping[str, Any], where: str) -> None:
        template = str(self._tokenizer.chat_template)
        for name in arguments:
            if name in OWN_ARGUMENTS:
                raise ManifestError(f"the template's argument {name!r} is Orbit's own", where=where, fix="remove it")
            # A recipe may be tried with a tiny model that ships with Orbit, whose template knows no such argument.
            is_recipe = where == ARGUMENTS and BUILTIN in self._folder.parents
            if not is_recipe and not re.search(rf"\b{re.escape(name)}\b", template):
                near = get_close_matches(name, re.findall(r"\w+", template), 1)
                raise ModelError(
                    f"the chat template reads no argument {name!r}", where=where,
                    fix=f"did you mean {near[0]!r}?" if near else "remove it, or use a template that reads it",
                )  # fmt: skip
        self._template_arguments |= arguments

    def given(self, arguments: Mapping[str, Any], where: str) -> ChatTokenizer:
        """This tokenizer with more arguments of the template. Raises as the constructor does, naming `where`."""
        made = copy.copy(self)
        made._template_arguments = {**self._template_arguments}
        made._give(arguments, where)
        return made

    def encode_chat(self, messages: Messages, *, tools: Tools = ()) -> list[int]:
        """Ids of the conversation up to the start of the assistant's answer."""
        return self.encode_many([messages], tools=tools)[0]

    def encode_many(self, conversations: Sequence[Messages], *, tools: Tools = ()) -> list[list[int]]:
        """`encode_chat` for each conversation, in one call to the tokenizer."""
        return self.encode_texts([self.render(messages, tools) for messages in conversations])

    def encode_continuation(
        self, messages: Messages, answered: int, last_id: int | None, *, tools: Tools = ()
    ) -> list[int]:
        """Ids of what follows a sampled answer: its end, the messages after it, and the start of the next answer.

        Sampled tokens are never encoded again. The conversation is rendered with a placeholder for the answer, with and
        without what follows; from the placeholder on, the shorter text must be a prefix of the longer.

        Args:
            messages: the whole conversation.
            answered: index of the sampled answer; what follows it is new.
            last_id: last token of the answer; an end token that the template also writes is not repeated.

        Raises:
            ModelError: the template ends a message differently if others follow, or omits it.
        """
        mark = _free_placeholder(messages)
        # Where the template writes a call as a message of its own, only one with a call may have a result after it.
        calls = {name: each for name, each in self._fields(messages[answered]).items() if name == "tool_calls"}
        before = [*messages[:answered], {"role": "assistant", "content": mark, **calls}]
        closing = self._after(mark, self._render(before, tools, answer=False))
        following = self._after(mark, self._render([*before, *messages[answered + 1 :]], tools))
        if not following.startswith(closing):
            raise ModelError(
                f"the chat template ends an answer with {closing[:40]!r}, and with {following[:40]!r} once messages "
                "follow: what follows cannot be added to what was sampled",
                where=str(self._folder),
                fix="use a template whose text with more messages starts with its text without them",
            )
        for message in messages[answered + 1 :]:
            if not _is_written(message, following):
                raise self._left_out(f"a message of role {message.get('role')!r}", ROLES_FIX)
        if calls and self._calls:
            # The calls are in what was sampled, up to the token that ends them if a stop string cut it off.
            is_ended = last_id in self.eos_ids
            end = next((each for each in self._calls.ends if closing.endswith(each) and not is_ended), "")
            following = following[len(closing) - len(end) :]
        if last_id is not None and last_id in self.eos_ids:
            following = following.removeprefix(self.decode_all([last_id]))
        return self.encode_text(following)

    def marker_after(self, answer: Mapping[str, Any]) -> int | None:
        """The token with which the next message begins, where that is what ends an answer, as in GLM's templates."""
        calls = self._fields(answer).get("tool_calls")
        messages = [{"role": "user", "content": PROBE}, answer if calls else {"role": "assistant", "content": PROBE}]
        following = {"role": "tool" if calls else "user", "content": PROBE}
        with suppress(ModelError):
            shorter, longer = (self._render([*messages, *more], (), answer=False) for more in ((), (following,)))
            ids = self.encode_text(longer.removeprefix(shorter))
            return ids[0] if ids and ids[0] in self.eos_ids else None
        return None

    def _fields(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message with the text of a completion, in the fields that the template takes."""
        content = message.get("content")
        if self._calls is None or message.get("role") != "assistant" or not isinstance(content, str):
            return message
        # Calls that are given as data say more than the text.
        given = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
        return {**message, **self._calls.message(content), **given}

    @property
    def writes_calls(self) -> bool:
        """Whether the template renders a message's `tool_calls`; some render only its text."""
        return self._call_form is not None

    @cached_property
    def _call_form(self) -> tuple[str | None, Any] | None:
        """The first of `CALL_FORMS` in which the template writes a call; None if it writes none."""
        is_refused = True
        for content, arguments in CALL_FORMS:
            # Kimi's template writes the id, which holds the name.
            call = {
                "type": "function", "id": f"functions.{PROBE}:0",
                "function": {"name": PROBE, "arguments": arguments},
            }  # fmt: skip
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": ""},
                {"role": "assistant", "content": content, "tool_calls": [call]},
            ]
            try:
                if PROBE in self._apply(messages, (), answer=False):
                    return content, arguments
                is_refused = False
            except ModelError:
                continue
        # A template that refuses all has a rule for such messages, and reports violations itself.
        return CALL_FORMS[0] if is_refused else None

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template itself writes the text of a content in parts, such as DeepSeek-V4's, in lines."""
        messages = [{"role": "user", "content": [{"type": "text", "text": PROBE}]}]
        try:
            text = self._apply(messages, (), answer=True)
        except ModelError:
            return False
        return PROBE in text and not any(f"{quote}{PROBE}{quote}" in text for quote in "'\"")

    def _with_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        """A plain message whose calls are in the form that the template takes."""
        calls = message.get("tool_calls")
        if not calls or not isinstance(calls, list):
            return message
        content, arguments = self._call_form or CALL_FORMS[0]
        if isinstance(arguments, str):
            calls = [
                _with_arguments(
                    call, lambda each: each if isinstance(each, str) else json.dumps(each, ensure_ascii=False)
                )
                for call in calls
            ]
        return {**message, "content": message["content"] or content, "tool_calls": calls}

    def encode_text(self, text: str) -> list[int]:
        """Ids of rendered text: the template already wrote the special tokens."""
        with self._explained():
            if self._backend is not None:
                ids = self._backend.encode(text, add_special_tokens=False).ids
            else:
                ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._known(ids)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns whatever the tokenizer raises into a ModelError."""
        try:
            yield
        except BaseException as error:  # a tokenizer's patterns are by the model's author, and may not come to an end
            # What the library gives up with after too many tries is a panic of Rust's, which is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            fix = "use the tokenizer that the model was trained with"
            raise ModelError(f"the tokenizer fails: {_summary(error)}", where=str(self._folder), fix=fix) from error

    def encode_raw(self, text: str) -> list[int]:
        """Ids of text that no template wrote, behind the token with which the tokenizer begins texts, if it has one."""
        ids, first = self.encode_text(text), self._first_ids
        return ids if ids[: len(first)] == first else [*first, *ids]

    @cached_property
    def _first_ids(self) -> list[int]:
        """Tokens that the tokenizer writes before a text by itself, such as the one that begins a sequence."""
        whole, plain = list(self._tokenizer("a")["input_ids"]), self.encode_text("a")
        return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(plain)] == plain), [])

    def _known(self, ids: Iterable[int]) -> list[int]:
        """The ids, for each of which the model has an embedding."""
        made = list(ids)
        if self._has_more and self._rows is not None and max(made, default=0) >= self._rows:
            number = next(each for each in made if each >= self._rows)
            raise NoEmbedding(self.text_of(number), number, self._rows, self._folder)
        return made

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_text` of each, in one call."""
        if len(texts) < 2:
            # A batch is handed to the backend's own threads, which for one text takes longer than the text.
            return [self.encode_text(text) for text in texts]
        with self._explained():
            if self._backend is not None:
                made = [each.ids for each in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]
            else:
                made = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [self._known(ids) for ids in made]

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Text with its special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def text_of(self, token_id: int) -> str:
        """Text of one token, special tokens included; cached, as there are few."""
        if token_id not in self._texts:
            self._texts[token_id] = self.decode_all([token_id])
        return self._texts[token_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text with spaces unchanged, and without special tokens but those that calls of tools consist of."""
        if self._markers.keys().isdisjoint(token_ids):
            return self._decode(token_ids)
        parts: list[str] = []
        start = 0
        for at, token in enumerate(token_ids):
            if token in self._markers:
                parts += [self._decode(token_ids[start:at]), self._markers[token]]
                start = at + 1
        return "".join([*parts, self._decode(token_ids[start:])])

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._decoder is not None:
            return str(self._decoder.decode(list(token_ids), skip_special_tokens=True))
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def difference(self, other: ChatTokenizer) -> str:
        """The first thing in which another tokenizer differs, in words; empty if both map texts to the same ids and
        back, render conversations alike, and end completions at the same tokens."""
        ours, theirs = self._tokenizer.get_vocab(), other._tokenizer.get_vocab()
        if ours != theirs:
            word = min({*ours.items()} ^ {*theirs.items()})[0]
            return f"{word!r} is token {theirs.get(word)}, not {ours.get(word)}"
        if self._rules() != other._rules():
            return "it cuts texts into tokens by other rules"
        if self._tokenizer.chat_template != other._tokenizer.chat_template:
            return "its chat template is another one"
        if {*self.eos_ids} != {*other.eos_ids}:
            return f"completions end at {sorted(other.eos_ids)}, not at {sorted(self.eos_ids)}"
        return ""

    def _rules(self) -> dict[str, Any]:
        """Rules by which the Rust tokenizer cuts texts, except those that each call sets; empty for one in Python."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        rules = json.loads(backend.to_str()) if backend is not None else {}
        return {name: rule for name, rule in rules.items() if name not in ("padding", "truncation", "version")}

    def _declared(self, tools: Tools) -> dict[str, Any]:
        """The template's arguments for these tools. Kimi-K2.5 and K2.6 describe them in TypeScript, which the
        publisher's own code writes before it renders the template; what that code refuses, the template writes as
        JSON."""
        plain: list[Any] = [dict(tool) for tool in tools]
        if not plain or TOOLS_AS_TEXT in self._template_arguments or TOOLS_AS_TEXT not in str(
            self._tokenizer.chat_template
        ):  # fmt: skip
            return {"tools": plain or None}
        try:
            return {"tools": sorted_keys(plain), TOOLS_AS_TEXT: write_tools(plain)}
        except NotWritable:
            return {"tools": sorted_keys(plain)}

    def _left_out(self, what: str, fix: str) -> ModelError:
        return ModelError(f"the chat template leaves out {what}", where=str(self._folder), fix=fix)

    def _after(self, mark: str, text: str) -> str:
        if text.count(mark) != 1:
            raise ModelError(
                f"the chat template writes an assistant's message {text.count(mark)} times",
                where=str(self._folder),
                fix="use a template that writes the text of each message once, as it is",
            )
        return text.partition(mark)[2]

    def render(self, messages: Messages, tools: Tools = (), *, answer: bool = True) -> str:
        """The conversation as text; with `answer`, up to where the assistant's begins.

        Raises:
            ModelError: the template refuses it, or leaves a message, a call or the tools out.
        """
        text = self._render(messages, tools, answer=answer)
        if tools and not (
            self._knows_tools or (self._writes_tools and all(_tool_name(tool) in text for tool in tools))
        ):
            raise self._left_out("the tools that may be called", TOOLS_FIX)
        for index, message in enumerate(messages):
            content = message.get("content")
            if isinstance(content, list) and not isinstance(joined_parts(content), str):
                raise self._left_out(f"parts of message {index} that are not text", "write texts only")
            if isinstance(calls := message.get("tool_calls"), list) and calls:
                if not (self.writes_calls and all(_tool_name(call) in text for call in calls)):
                    raise self._left_out(f"the calls of message {index}", TOOLS_FIX)
            elif not (_is_written(message, text) or self._writes(messages, index, tools)):
                raise self._left_out(f"message {index}, of role {message.get('role')!r}", ROLES_FIX)
        return text

    def _writes(self, messages: Messages, index: int, tools: Tools) -> bool:
        """Whether the template writes a message at all: it may change its text, such as take out its reasoning."""
        mark = _free_placeholder(messages)
        marked = [*messages[:index], {**messages[index], "content": mark}, *messages[index + 1 :]]
        try:
            return mark in self._render(marked, tools, answer=False)
        except ModelError:
            return True

    @property
    def _knows_tools(self) -> bool:
        """Whether tools may stay unwritten: the models that ship with Orbit were trained with those of its examples,
        and for Kimi the manifest may describe them."""
        return BUILTIN in self._folder.parents or TOOLS_AS_TEXT in self._template_arguments

    @cached_property
    def _writes_tools(self) -> bool:
        """Whether the template writes which tools may be called, in some conversation."""
        function = {"name": PROBE, "description": PROBE, "parameters": {"type": "object", "properties": {}}}
        messages = [{"role": "system", "content": ""}, {"role": "user", "content": ""}]
        for asked in (messages[1:], messages):
            with suppress(ModelError):
                if PROBE in self._apply(asked, [{"type": "function", "function": function}], answer=True):
                    return True
        return False

    def _render(self, messages: Messages, tools: Tools, *, answer: bool = True) -> str:
        plain = [plain_message(message) for message in messages]
        if any(isinstance(each["content"], list) for each in plain) and not self._takes_parts:
            plain = [{**each, "content": joined_parts(each["content"])} for each in plain]
        taken = [self._with_calls(dict(self._fields(each))) for each in plain]
        return self._apply(taken, tools, answer=answer)

    def _apply(self, messages: Messages, tools: Tools, *, answer: bool) -> str:
        if self._runs_away is not None:
            raise self._runs_away
        try:
            too_much = _RunsAwayError(f"more than {MAX_ROW >> 20} million characters, or a power (`**`)")
            with _TEMPLATES.limited():
                if self._num_folded > MAX_ROW:
                    raise too_much
                text = str(
                    self._tokenizer.apply_chat_template(
                        messages,
                        tokenize=False,
                        add_generation_prompt=answer,
                        **self._declared(tools),
                        **self._clock,
                        **self._template_arguments,
                    )
                )
            if len(text) > MAX_ROW:
                raise too_much
            return text
        except _RunsAwayError as error:
            self._runs_away = ModelError(
                f"the chat template does not come to an end: {str(error) or f'{TEMPLATE_SECONDS:.0f} s'}",
                where=str(self._folder),
                fix="correct it",
            )
            raise self._runs_away from None
        except Exception as error:  # templates are programs by the model's author and may raise anything
            raise ModelError(
                f"the chat template refuses a prompt: {error}",
                where=str(self._folder),
                fix="use the roles that the template knows, in the order it expects, and arguments that it takes "
                f"({ARGUMENTS})",
            ) from error

    @cached_property
    def _num_folded(self) -> float:
        """Characters of all texts that Jinja computes while it compiles the template: Python then reads them as source,
        for seconds in which nothing can stop it. Infinite with a power, which no real template has: nothing can stop
        `10 ** 10 ** 10` either."""
        from jinja2 import TemplateError, nodes, optimizer
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        text = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", str(self._tokenizer.chat_template))
        with suppress(TemplateError):  # it is refused where it is used
            if (tree := environment.parse(text)).find(nodes.Pow):
                return math.inf
            folded = optimizer.optimize(tree, environment).find_all(nodes.Const)
            return sum(len(each.value) for each in folded if isinstance(each.value, str))
        return 0


class _RunsAwayError(Exception):
    """A chat template does not come to an end."""


class _TemplateLimit:
    """Stops templates that loop for ever. A thread of its own looks once a second, and raises `_RunsAwayError` in each
    thread that has spent more than `TEMPLATE_SECONDS` of processor time on one."""

    def __init__(self) -> None:
        self._lock, self._begun, self._watcher = threading.Lock(), dict[int, float](), threading.Thread()

    @contextmanager
    def limited(self) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            self._begun[thread] = _seconds(thread)
            if not self._watcher.is_alive():
                self._watcher = threading.Thread(target=self._watch, name="orbit-templates", daemon=True)
                self._watcher.start()
        try:
            yield
        finally:
            with self._lock:
                if self._begun.pop(thread, None) is None:
                    # What was to be raised here may not have been yet.
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)

    def _watch(self) -> None:
        raised = ctypes.py_object(_RunsAwayError)
        while True:
            time.sleep(1.0)
            with self._lock:
                for thread in [each for each, at in self._begun.items() if _seconds(each) - at > TEMPLATE_SECONDS]:
                    del self._begun[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def _seconds(thread: int) -> float:
    """Processor time of a thread; where the system does not tell it, the time."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


_TEMPLATES = _TemplateLimit()


def _is_written(message: Mapping[str, Any], text: str) -> bool:
    """Whether the text contains that of the message, as it is or within JSON."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [each.strip() for part in parts if isinstance(each := part.get("text"), str)]
    return all(
        each in text or any(json.dumps(each, ensure_ascii=is_ascii)[1:-1] in text for is_ascii in (True, False))
        for each in texts
    )


def _tool_name(declared: Any) -> str:
    """Name of a tool or of a call; empty for one that has none, which templates judge."""
    function = declared.get("function", declared) if isinstance(declared, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _free_placeholder(messages: Messages) -> str:
    """A word that occurs in no message and that no template changes."""
    everything = repr(list(messages))
    return next(mark for number in count() if (mark := f"orbit{number}answer") not in everything)


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The one form of a message, in which rows, episodes and requests of clients are rendered: a missing content is
    empty text, and arguments of calls are objects where they are JSON in a string, as in OpenAI's interface."""
    made = {**message, "content": "" if message.get("content") is None else message["content"]}
    if isinstance(calls := message.get("tool_calls"), list):
        made["tool_calls"] = [_with_arguments(call, _read_arguments) for call in calls]
    return made


def joined_parts(content: Any) -> Any:
    """The text of a content whose parts are all text; any other content as it is."""
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    words = [text for text in texts if isinstance(text, str)]
    return "".join(words) if len(words) == len(texts) else content


def _with_arguments(call: Any, convert: Callable[[Any], Any]) -> Any:
    try:
        function = call["function"]
        return {**call, "function": {**function, "arguments": convert(function["arguments"])}}
    except (KeyError, TypeError, ValueError, RecursionError):
        return call


def _read_arguments(text: Any) -> dict[str, Any]:
    arguments = json.loads("{}" if text in ("", None) else text)
    if not isinstance(arguments, dict):
        raise ValueError("no object")
    return arguments


def _load_tokenizer(folder: Path) -> Any:
    check_folder(folder)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise ModelError(
            "the model folder holds no tokenizer",
            where=str(folder),
            fix=f"copy the tokenizer files of the model into it ({TOKENIZER_FILES[0]}, tokenizer_config.json)",
        )
    # The library would take such a file too, and cut texts by another model's rules.
    tokenizer = load_tiktoken(folder) if is_tiktoken(folder) else _load_published(folder)
    if not tokenizer.chat_template and (beside := folder / "chat_template.json").is_file():
        # As processors of images were published, with the template for texts.
        tokenizer.chat_template = load_settings(beside).get("chat_template")
    if not tokenizer.chat_template and (ours := own_template(folder)):
        tokenizer.chat_template = ours.read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template",
            where=str(folder),
            fix="add chat_template.jinja, or a chat_template to tokenizer_config.json",
        )
    return tokenizer


def _load_published(folder: Path) -> Any:
    """Loads the tokenizer by the rules of tokenizer.json alone if there is one: the class that tokenizer_config.json
    names, or that the library has for the model's type, may cut texts by rules of its own.
    """
    from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

    try:
        if not (folder / "tokenizer.json").is_file():
            return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        # As that does: a type that the library does not know is no error, but a value that is impossible is one.
        with suppress(ValueError, OSError):
            AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        made = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True, _from_auto=True)
    except Exception as error:  # the library raises anything from OSError to KeyError here
        _check_settings(folder)
        raise ModelError(
            f"the tokenizer cannot be loaded: {_summary(error)}",
            where=str(folder),
            fix="copy or download the tokenizer files and config.json of the model again",
        ) from error
    _note_class(folder, made.backend_tokenizer)
    return made


def _note_class(folder: Path, backend: Any) -> None:
    """Tells of a class in tokenizer_config.json that cuts texts otherwise than tokenizer.json. A class brings its rules
    without a vocabulary too; the vocabulary is always that of tokenizer.json."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    def ids(rules: Any) -> list[int]:
        text = rules.normalizer.normalize_str(SAMPLE) if rules.normalizer else SAMPLE
        pieces = rules.pre_tokenizer.pre_tokenize_str(text) if rules.pre_tokenizer else [(text, None)]
        return [token.id for piece, _ in pieces for token in backend.model.tokenize(piece)]

    with suppress(Exception):  # no settings, no such class, or one without rules of its own
        settings = load_settings(folder / "tokenizer_config.json")
        name, options = settings["tokenizer_class"], {key: on for key, on in settings.items() if isinstance(on, bool)}
        if ids(tokenizer_class_from_name(name)(**options).backend_tokenizer) != ids(backend):
            _warn_once("%s: tokenizer_class %s is ignored: tokenizer.json cuts texts by other rules", folder, name)


def _find_backend(tokenizer: Any) -> Any | None:
    """The Rust tokenizer itself, where transformers adds nothing to a text's ids: it takes a tenth of the time for a
    turn's text. None where a model's class has its own way."""
    if not _is_plain(tokenizer, "__call__", "_encode_plus", "set_truncation_and_padding"):
        return None
    # A call switches off truncation and padding, which tokenizer.json may ask for.
    tokenizer("", add_special_tokens=False)
    return tokenizer.backend_tokenizer


def _is_plain(tokenizer: Any, *names: str) -> bool:
    """Whether the tokenizer has every fast tokenizer's methods, not ones of its model class."""
    from transformers import PreTrainedTokenizerFast

    return isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name) for name in names
    )


def _check_settings(folder: Path) -> None:
    """Checks config.json, which the library also reads: it blames the tokenizer for any broken file."""
    for name in FILES:
        if name.endswith(".json") and (folder / name).is_file():
            load_settings(folder / name)
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise ModelError(
            f"transformers cannot read this configuration: {_summary(error)}",
            where=str(folder / "config.json"),
            fix="correct that value, or copy or download the file again",
        ) from error


def _summary(error: BaseException) -> str:
    """The first two lines: the library names a field in the first, and what is wrong with it in the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def _embedding_rows(folder: Path) -> int | None:
    """Rows of the embedding, by config.json; None if that does not say."""
    path = folder / "config.json"
    config = load_settings(path) if path.is_file() else {}
    rows = language_part(config).get("vocab_size", config.get("vocab_size"))
    return rows if type(rows) is int and rows > 0 else None


def exceeds_embedding(folder: Path) -> bool:
    """Whether tokenizer.json has tokens for which the model has no embedding, by the files alone."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        rows, file = _embedding_rows(folder), json.loads((folder / TOKENIZER_FILES[0]).read_bytes())
        vocabulary = file["model"]["vocab"]
        numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return rows is not None and max([*numbers, *(each["id"] for each in file["added_tokens"])], default=0) >= rows
    return False


def named_eos_ids(folder: Path) -> list[int]:
    """The end-of-sequence tokens that the model's configuration names.

    Raises:
        ModelError: one of them is no token of the model.
    """
    found: list[int] = []
    rows = _embedding_rows(folder)
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = load_settings(path).get("eos_token_id") if path.is_file() else None
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if wrong := [each for each in listed if type(each) is not int or each < 0 or (rows and each >= rows)]:
            what = f"the number of one of the model's {rows} tokens" if rows else "a token's number"
            raise ModelError(f"eos_token_id is {wrong[0]!r}, not {what}", where=str(path), fix="correct it")
        found += listed
    return found


def _resolve_eos_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    found = named_eos_ids(folder)
    if tokenizer.eos_token_id is not None:
        found.append(int(tokenizer.eos_token_id))
    if not found:
        raise ModelError(
            "neither generation_config.json, config.json nor the tokenizer names an end-of-sequence token",
            where=str(folder),
            fix="set eos_token_id in generation_config.json",
        )
    return tuple(dict.fromkeys(found))
