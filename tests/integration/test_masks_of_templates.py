"""Whatever a chat template writes around answers, exactly what was sampled trains, and is not encoded again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.environments.episodes import EpisodeLimits, EpisodeSettings
from orbit_runtime.environments.turns import MultiTurn, OpponentResponse
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.types import Completion, Prompt, Sampling
from orbit_runtime.workers.user_code.reward_pool import RewardThreads
from tests.unit_runtime.environments.test_multi_turn import Plays, Says

END = 1
"""`<|im_end|>` of the shipped model."""
PLAIN = range(2, 40)
"""Ids of other tokens of it."""


@dataclass(frozen=True)
class Template:
    """What is written before a role, between it and the text, and after it; and once before everything."""

    head: str
    before: str
    between: str
    after: str
    trims: bool

    @property
    def jinja(self) -> str:
        text = "m.content | trim" if self.trims else "m.content"
        head, before, between, after = map(repr, (self.head, self.before, self.between, self.after))
        message = f"{{{{ {before} + m.role + {between} + ({text}) + {after} }}}}"
        start = f"{{% if add_generation_prompt %}}{{{{ {before} + 'assistant' + {between} }}}}{{% endif %}}"
        return f"{{{{ {head} }}}}{{% for m in messages %}}{message}{{% endfor %}}{start}"

    def written(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The messages, and where the next answer begins."""
        all_ = (f"{self.before}{m['role']}{self.between}{self._text(m)}{self.after}" for m in messages)
        return f"{''.join(all_)}{self.before}assistant{self.between}"

    def _text(self, message: Mapping[str, Any]) -> str:
        return str(message["content"]).strip() if self.trims else str(message["content"])


marks = st.text(st.sampled_from("abc|<>[]/: \n"), max_size=6)
templates = st.builds(
    Template, marks, marks, marks, st.sampled_from(["<|im_end|>", "<|im_end|>\n", "</s>", "\n\n", ""]), st.booleans()
)
words = st.text(st.sampled_from("abc 123+="), min_size=1, max_size=8).filter(str.strip)
answers = st.tuples(st.lists(st.sampled_from(PLAIN), max_size=6), st.booleans())
"""Tokens as no tokenizer would cut a text, and whether an end token follows them."""
conversations = st.lists(st.tuples(answers, st.sampled_from(["user", "tool"]), words), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("model") / "tiny-adder"
    shutil.copytree(builtin_folder("tiny-adder", "BF16"), folder)
    return ChatTokenizer(folder)


@given(templates, conversations)
@settings(max_examples=40, deadline=None)
def test_masks_cover_exactly_the_sampled_tokens_under_any_template(
    tokenizer: ChatTokenizer, template: Template, turns: list[tuple[tuple[list[int], bool], str, str]]
) -> None:
    tokenizer._tokenizer.chat_template = template.jinja
    sampled = [[*ids, *([END] if ends else [])] for (ids, ends), _, _ in turns]
    said = [
        Completion(0, ids, [-0.5] * len(ids), [4] * len(ids), "stop", tokenizer.decode(ids))  # type: ignore[arg-type]
        for ids in sampled
    ]
    replies = [OpponentResponse([{"role": role, "content": text}]) for _, role, text in turns[:-1]]
    policy, opponent = Says(*said), Plays(*replies, OpponentResponse(done=True))
    limits = EpisodeSettings("run", Sampling(), EpisodeLimits(turns=9), 1, 0, gives_reward=True)
    with RewardThreads([]) as scorer:
        environment = MultiTurn(limits, tokenizer, scorer, {}, lambda: opponent)
        (episode,) = environment.build_episodes([Prompt("p/0", 0, ({"role": "user", "content": "hi"},))], 3)
        rollout = asyncio.run(environment.play(episode, policy)).rollout

    expected, flags = [], []
    given_texts = [template.head + template.written([{"role": "user", "content": "hi"}])]
    for ids, reply in zip(sampled, replies, strict=False):
        after = template.after
        # An end token that was sampled is the one that the template writes there.
        if ids and ids[-1] == END:
            after = after.removeprefix("<|im_end|>")
        given_texts.append(after + template.written(reply.messages))
    for text, ids in zip(given_texts, sampled, strict=True):
        between = tokenizer.encode_text(text)
        assert tokenizer.decode_all(between) == text
        expected += [*between, *ids]
        flags += [0] * len(between) + [1] * len(ids)
    assert rollout.token_ids_T.tolist() == expected
    assert rollout.loss_mask_T.tolist() == flags
    assert [version == 4 for version in rollout.versions_T] == [flag == 1 for flag in flags]
