"""What the front keeps of answers that are streamed."""

from __future__ import annotations

import pickle
from array import array

from orbit_runtime.rollout.streaming import TokenDeltas
from orbit_runtime.serve.answers import ChoicePart
from orbit_runtime.serve.channel import BatchStep, Choice
from orbit_runtime.serve.engine_client import EngineClient
from orbit_runtime.serve.names import ServedModel
from orbit_runtime.types import FLOATS, TOKENS, Sampling

TOP, STEPS = 3, 400


def columns(part: ChoicePart) -> list[array]:
    return [part.token_ids_T, part.logprobs_T, *(part.alternatives or ())]


def step(at: int) -> BatchStep:
    """One token of request 0 with what else was probable in its place."""
    top = (array(TOKENS, range(at, at + TOP)), array(FLOATS, [-at - 1.0] * TOP))
    news = TokenDeltas(array("q", [0]), array(TOKENS, [1]), array(TOKENS, [at]), array(FLOATS, [-0.5]), {0: top})
    return BatchStep(news, [])


def test_a_streamed_answers_tokens_and_alternatives_are_never_copied_again() -> None:
    """Counted: elements of columns that were made anew, which of a copy at each step are 4 * STEPS * STEPS."""
    engine = EngineClient(
        lambda _: None, [ServedModel("base", None, "a folder")], "base", concurrent=1, ended=lambda *_: None
    )
    sampling = Sampling(max_new_tokens=STEPS)
    job = engine.submit("base", [Choice((1,), 0, sampling, TOP)], is_streamed=True)
    (part,) = job.parts
    made: dict[int, array] = {}
    copied = 0
    for at in range(STEPS):
        news = step(at)
        engine.hear(news)
        for column in columns(part):
            if id(column) not in made:
                made[id(column)] = column
                copied += len(column)
        assert [len(column) for column in news.deltas.alternatives[0]] == [TOP, TOP], "what was told is nobody else's"
    assert copied <= 2 * (1 + TOP)
    ids, logprobs = part.alternatives
    assert ids == array(TOKENS, [each for at in range(STEPS) for each in range(at, at + TOP)])
    assert logprobs == array(FLOATS, [-at - 1.0 for at in range(STEPS) for _ in range(TOP)])


def test_alternatives_of_two_pieces_that_come_at_once_are_added_once() -> None:
    engine = EngineClient(
        lambda _: None, [ServedModel("base", None, "a folder")], "base", concurrent=1, ended=lambda *_: None
    )
    job = engine.submit("base", [Choice((1,), 0, Sampling(max_new_tokens=STEPS), 1)], is_streamed=True)
    (part,) = job.parts
    top = (array(TOKENS, [7, 8, 9]), array(FLOATS, [-1.0, -2.0, -3.0]))
    pieces = TokenDeltas(
        array("q", [0, 0]), array(TOKENS, [1, 2]), array(TOKENS, [4, 5, 6]), array(FLOATS, [-0.5] * 3), {0: top}
    )
    engine.hear(BatchStep(pieces, []))
    assert (part.token_ids_T, part.alternatives) == (array(TOKENS, [4, 5, 6]), top)


def test_what_ended_with_its_news_has_each_token_once_and_is_told_before_what_goes_on() -> None:
    told = []
    engine = EngineClient(
        lambda _: None,
        [ServedModel("base", None, "a folder")],
        "base",
        concurrent=2,
        ended=lambda _, part: told.append(list(part.token_ids_T)),
    )
    jobs = [
        engine.submit("base", [Choice((1,), 0, Sampling(max_new_tokens=STEPS))], is_streamed=True) for _ in range(2)
    ]
    news = TokenDeltas(
        array("q", [0, 1]), array(TOKENS, [2, 1]), array(TOKENS, [4, 5, 6]), array(FLOATS, [-0.5] * 3), {}
    )
    ended = (0, array(TOKENS, [4, 5]), array(FLOATS, [-0.5, -0.5]), "length", "ab", None)
    engine.hear(BatchStep(news, [ended]))
    assert told == [[4, 5]]
    assert [list(job.parts[0].token_ids_T) for job in jobs] == [[4, 5], [6]]
    assert [job.parts[0].finish_reason for job in jobs] == ["length", None]
    assert engine.under_way == 1


def test_news_travel_as_they_are() -> None:
    top = (array(TOKENS, [7, 8]), array(FLOATS, [-1.0, -2.0]))
    news = TokenDeltas(
        array("q", [1 << 40, 3]), array(TOKENS, [1, 2]), array(TOKENS, [4, 5, 6]), array(FLOATS, [-0.5] * 3), {3: top}
    )
    back = pickle.loads(pickle.dumps(news, pickle.HIGHEST_PROTOCOL))
    assert back == news
    for name in ("request_ids_D", "counts_D", "token_ids_T", "logprobs_T"):
        assert getattr(back, name).typecode == getattr(news, name).typecode
