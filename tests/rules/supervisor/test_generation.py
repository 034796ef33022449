"""When a supervisor replaces a process, after how long, and when there is no use in that."""

import random
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from lowq.supervisor import process as rules
from lowq.supervisor.process import Generation


def child(**fields: Any) -> Any:
    """What a generation looks at."""
    return SimpleNamespace(**{"ready": False, "reason": None, "passing": False, "started_at": 0, **fields})


@pytest.fixture(autouse=True)
def _without_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: (low + high) / 2)


def proven(processes: int) -> Generation:
    """A generation that has been ready, whose processes are all gone."""
    generation = Generation(1, processes)
    generation.became_ready()
    return generation


def test_only_one_process_is_tried_until_one_was_ready() -> None:
    generation = Generation(1, 3)
    assert [place.number for place in generation.startable()] == [1]
    generation.places[0].child = child()
    assert generation.startable() == []
    generation.places[0].child.ready = True
    generation.became_ready()
    assert [place.number for place in generation.startable()] == [2, 3]
    assert not generation.is_complete()
    for place in generation.startable():
        place.child = child(ready=True)
    assert generation.is_complete()


def test_delays_double_up_to_a_limit_and_one_that_lived_long_is_replaced_at_once() -> None:
    generation = proven(2)
    place, other = generation.places
    other.child = child(ready=True)
    delays = [generation.lost(place, child(ready=True), 1.0) for _ in range(10)]
    assert delays == [0, 0.25, 0.5, 1, 2, 4, 8, 15, 15, 15]
    assert place.start_at == 16.0
    assert generation.lost(other, child(ready=True), 1.0) == 0  # each place by itself
    lived = child(ready=True, started_at=100)
    assert generation.lost(place, lived, 100 + rules.FORGIVEN_AFTER - 1) == 15
    assert generation.lost(place, lived, 100 + rules.FORGIVEN_AFTER) == 0


def test_one_that_asked_to_be_replaced_is_replaced_at_once_however_often_if_it_was_ready() -> None:
    generation = proven(1)
    (place,) = generation.places
    delays = [generation.lost(place, child(), 1.0, asked_for=True) for _ in range(3)]
    assert delays == [0, 0.25, 0.5]
    deaths = place.deaths
    assert [generation.lost(place, child(ready=True), 7.0, asked_for=True) for _ in range(10)] == [0.0] * 10
    assert (place.start_at, place.deaths) == (7.0, deaths)


def test_a_new_generation_has_some_tries_unless_it_says_that_there_is_no_use() -> None:
    for lost in (child(), None):  # None: it can't even be started
        generation = Generation(1, 3)
        assert [generation.lost(generation.places[0], lost, 0.0) for _ in range(5)] == [0, 0.25, 0.5, 1, None]
    for passing, delay in ((False, None), (True, 0)):
        generation = Generation(1, 3)
        assert generation.lost(generation.places[0], child(reason="no queue", passing=passing), 0.0) == delay


def test_while_another_is_ready_trying_goes_on() -> None:
    generation = proven(2)
    generation.places[1].child = child(ready=True)
    for _ in range(50):
        assert generation.lost(generation.places[0], child(reason="broken by now"), 0.0) is not None


def test_one_that_was_ready_once_gives_up_when_all_of_its_processes_have_failed_often() -> None:
    generation = proven(2)
    tries = [generation.lost(generation.places[number % 2], child(reason="broken by now"), 0.0) for number in range(10)]
    assert None not in tries[:9]
    assert tries[9] is None


def test_one_that_was_ready_once_waits_for_redis_with_short_delays_for_hours() -> None:
    generation = proven(1)
    away = child(reason="Redis does not answer", passing=True)
    delays = [generation.lost(generation.places[0], away, 0.0) for _ in range(3000)]
    assert None not in delays
    assert delays[-1] == rules.PASSING_DELAY


def test_at_rest_nothing_is_started() -> None:
    generation = proven(3)
    generation.rest()
    assert generation.startable() == []
    assert {place.start_at for place in generation.places} == {inf}
