"""The backends that the tests share between processes: their own faults would look like faults of the product."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest
from dramatiq import Message
from dramatiq.rate_limits import Barrier, ConcurrentRateLimiter
from dramatiq.results import ResultFailure, ResultMissing

from tests.harness.backends import FileLimits, FileResults

PROCESSES, EACH = 4, 50


def message(message_id: str = "m") -> Message[object]:
    return Message("default", "build", (), {}, {}, message_id, 0)


def arrive(folder: Path, times: int) -> int:
    """Arrive at the barrier so often; return how often it was said to be complete."""
    barrier = Barrier(FileLimits(folder), "barrier", ttl=60_000)
    return sum(barrier.wait(block=False) for _ in range(times))


def test_of_all_who_arrive_at_a_barrier_from_several_processes_one_is_the_last(tmp_path: Path):
    """Hurts the tests of groups: a lost or a doubled count would be blamed on the product."""
    Barrier(FileLimits(tmp_path), "barrier", ttl=60_000).create(PROCESSES * EACH)

    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        said = pool.starmap(arrive, [(tmp_path, EACH)] * PROCESSES)

    assert sum(said) == 1
    assert FileLimits(tmp_path).values() == {"barrier": 1}


def test_a_mutex_lets_one_in_at_a_time(tmp_path: Path):
    """Hurts the tests of rate limits."""
    mutex = ConcurrentRateLimiter(FileLimits(tmp_path), "mutex", limit=1, ttl=60_000)

    with mutex.acquire(raise_on_failure=False) as first, mutex.acquire(raise_on_failure=False) as second:
        assert (first, second) == (True, False)
    with mutex.acquire(raise_on_failure=False) as third:
        assert third


def test_a_value_is_gone_after_its_time_to_live(tmp_path: Path):
    """Hurts the tests of what a dead process held."""
    limits = FileLimits(tmp_path)
    assert limits.add("key", 1, 1)
    while limits.values():
        time.sleep(0.001)

    assert limits.add("key", 2, 60_000)
    assert not limits.add("key", 3, 60_000)
    assert not limits.incr("key", 1, 2, 60_000)
    assert limits.incr_and_sum("other", lambda: ["key", "other"], 1, 3, 60_000)
    assert not limits.incr_and_sum("other", lambda: ["key", "other"], 1, 3, 60_000)
    assert limits.values() == {"key": 2, "other": 1}


def test_results_are_read_back_and_their_history_is_kept(tmp_path: Path):
    """Hurts the tests of results: what was overwritten must be seen."""
    results = FileResults(tmp_path)
    with pytest.raises(ResultMissing):
        results.get_result(message())
    assert results.history(message()) == []

    results.store_result(message(), {"built": [1, None]}, 60_000)
    assert FileResults(tmp_path).get_result(message()) == {"built": [1, None]}
    results.store_exception(message(), ValueError("no route"), 60_000)
    results.store_result(message("other"), None, 0)

    with pytest.raises(ResultFailure, match="no route"):
        results.get_result(message())
    with pytest.raises(ResultMissing):
        results.get_result(message("other"))
    assert results.history(message()) == [{"built": [1, None]}, "ValueError: no route"]
    assert results.history(message("other")) == [None]
