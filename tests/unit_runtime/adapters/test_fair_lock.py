"""Whose turn it is: in the order of asking, again for who has it, and never lost."""

from __future__ import annotations

import threading
import time

import pytest

from orbit_runtime.adapters.fair_lock import FairLock


def test_who_asked_first_comes_first_however_often_the_holder_asks_again() -> None:
    turn, order, asked = FairLock(), [], [threading.Event() for _ in range(3)]

    def ask(number: int) -> None:
        asked[number].set()
        with turn:
            order.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    with turn:
        for number, thread in enumerate(threads):
            thread.start()
            asked[number].wait()
            while len(turn._asked) < number + 2:
                time.sleep(0.001)
    with turn:
        order.append(9)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 9]


def test_who_has_it_may_take_it_again_and_keeps_it_until_the_last_end() -> None:
    turn, entered = FairLock(), threading.Event()

    def ask() -> None:
        with turn:
            entered.set()

    with turn:
        with turn:
            thread = threading.Thread(target=ask)
            thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(10)
    thread.join()


def test_an_error_within_gives_it_back() -> None:
    turn = FairLock()
    with pytest.raises(ValueError), turn:  # noqa: PT011
        raise ValueError
    other = threading.Thread(target=lambda: turn.__enter__())
    other.start()
    other.join(10)
    assert not other.is_alive()


def test_who_is_interrupted_while_it_waits_keeps_nobody_waiting() -> None:
    turn, held, over = FairLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with turn:
            held.set()
            over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    real = turn._changed.wait_for

    def interrupted(predicate: object, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    turn._changed.wait_for = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt), turn:
        pass
    turn._changed.wait_for = real  # type: ignore[method-assign]
    over.set()
    holder.join()
    with turn:
        assert len(turn._asked) == 1
