"""Where a prompt goes: to the cache that knows it, as long as nobody gets much more than the others."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from orbit_runtime.rollout.routing import BLOCK_TOKENS, SLACK, PrefixRouter

SYSTEM = list(range(1000, 1000 + 3 * BLOCK_TOKENS))


def test_the_next_turn_of_a_conversation_goes_where_its_first_turns_are_cached() -> None:
    router = PrefixRouter(3, capacity=64)
    turns = {talk: [*range(talk * 100, talk * 100 + 40)] for talk in range(6)}
    idle = {"loads": [0, 0, 0], "alive": [True] * 3}
    first = {}
    for talk, tokens in turns.items():
        first[talk] = router.choose("policy-v1", tokens, 1, loads=[talk % 3 == 1, talk % 3 == 2, 0], alive=[True] * 3)
    for talk in (3, 1, 5, 0, 4, 2):
        assert router.choose("policy-v1", [*turns[talk], 7, 8, 9], 1, **idle) == first[talk]


def test_another_version_of_the_policy_shares_no_cache() -> None:
    router = PrefixRouter(2, capacity=64)
    assert router.choose("policy-v1", SYSTEM, 1, loads=[1, 0], alive=[True, True]) == 1
    assert router.choose("policy-v1", SYSTEM, 1, loads=[0, 0], alive=[True, True]) == 1
    assert router.choose("policy-v2", SYSTEM, 1, loads=[0, 0], alive=[True, True]) == 0


def test_a_prefix_that_all_prompts_share_does_not_send_them_all_to_one() -> None:
    router, loads = PrefixRouter(4, capacity=1000), [0, 0, 0, 0]
    draws = random.Random(0)
    for _ in range(200):
        chosen = router.choose(None, [*SYSTEM, draws.randrange(10**6)], 4, loads=loads, alive=[True] * 4)
        assert chosen is not None
        loads[chosen] += 4
        assert max(loads) <= SLACK * sum(loads) / 4 + 4
    assert min(loads) > 0


def test_a_dead_server_gets_nothing_and_where_all_are_busy_or_dead_nobody_is_chosen() -> None:
    router = PrefixRouter(2, capacity=8)
    assert router.choose(None, SYSTEM, 4, loads=[0, 0], alive=[False, True]) == 1
    assert router.choose(None, SYSTEM, 4, loads=[0, 0], alive=[False, False]) is None
    assert router.choose(None, SYSTEM, 4, loads=[8, 6], alive=[True, True]) is None
    assert router.choose(None, SYSTEM, 20, loads=[8, 0], alive=[True, True]) == 1, "more than fits goes to an idle one"


def test_a_restarted_server_is_known_to_have_an_empty_cache() -> None:
    router = PrefixRouter(2, capacity=8)
    assert router.choose(None, SYSTEM, 1, loads=[1, 0], alive=[True, True]) == 1
    router.forget(1)
    assert router.choose(None, SYSTEM, 1, loads=[0, 0], alive=[True, True]) == 0


def test_what_it_remembers_is_bounded() -> None:
    router = PrefixRouter(1, capacity=8, kept_blocks=10)
    for start in range(0, 100 * BLOCK_TOKENS, BLOCK_TOKENS):
        router.choose(None, [*range(start, start + BLOCK_TOKENS)], 1, loads=[0], alive=[True])
    assert len(router._seen[0]) == 10


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 16)), min_size=1, max_size=60),
    st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_whatever_comes_the_chosen_one_lives_and_is_not_over_its_bound(
    asked: list[tuple[int, int]], alive: list[bool]
) -> None:
    router, loads = PrefixRouter(3, capacity=40), [0, 0, 0]
    for prompt, cost in asked:
        chosen = router.choose("a", [prompt] * 50, cost, loads=loads, alive=alive)
        if chosen is None:
            assert not any(alive) or all(load for load, lives in zip(loads, alive, strict=True) if lives)
            continue
        assert alive[chosen]
        assert loads[chosen] == 0 or loads[chosen] + cost <= 40
        loads[chosen] += cost
