from __future__ import annotations

import os
import threading

import pytest
import torch

from cascadeseg import batch, parallel
from cascadeseg.parallel import own_threads, processors, side_by_side

ALONE = not torch.backends.openmp.is_available()


@pytest.fixture
def four_threads(torch_threads):
    torch_threads(4)


@pytest.mark.skipif(ALONE, reason="torch counts its threads without OpenMP")
def test_two_work_at_a_time_each_with_half_of_the_threads(four_threads):
    both_are_here = threading.Barrier(2, timeout=20)

    def work(item: int) -> tuple[int, int]:
        both_are_here.wait()
        return item, torch.get_num_threads()

    assert side_by_side(work, [1, 2, 3, 4]) == [(1, 2), (2, 2), (3, 2), (4, 2)]
    assert torch.get_num_threads() == 4


@pytest.mark.skipif(ALONE, reason="torch counts its threads without OpenMP")
def test_threads_that_begin_meanwhile_have_all_of_torchs_threads(four_threads):
    """As the requests of a service do: what they have is theirs for good."""
    counts: list[int] = []

    def begin() -> None:
        new = threading.Thread(target=lambda: counts.append(own_threads()))
        new.start()
        new.join()

    def work(item: int) -> None:
        begin()
        side_by_side(lambda _: begin(), [1, 2])  # as within each of two lungs

    side_by_side(work, [1, 2])
    begin()
    assert counts == [4] * 7


def test_one_thread_works_alone(four_threads):
    torch.set_num_threads(1)
    assert side_by_side(lambda item: threading.current_thread().name, [1, 2]) == ["MainThread"] * 2


def test_an_error_comes_out_and_the_threads_are_as_they_were(four_threads):
    def work(item: int) -> int:
        if item == 2:
            raise ValueError("the second")
        return item

    with pytest.raises(ValueError, match="the second"):
        side_by_side(work, [1, 2, 3])
    assert torch.get_num_threads() == 4


def test_what_is_written_into_in_inference_mode_may_be_written_into_by_both(four_threads):
    with torch.inference_mode():
        whole = torch.zeros(4)
        side_by_side(lambda at: whole[at : at + 2].fill_(at + 1), [0, 2])
    assert whole.tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize(
    ("share", "expected"),
    [(None, 6), ("max 100000\n", 6), ("250000 100000\n", 3), ("1600000 100000\n", 6), ("5000 100000\n", 1)],
)
def test_processors_are_counted_that_the_process_may_use(tmp_path, monkeypatch, share, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(parallel, "CONTAINER_SHARE", tmp_path / "cpu.max")
    if share:
        (tmp_path / "cpu.max").write_text(share, encoding="utf-8")
    assert processors() == expected


@pytest.mark.parametrize(
    ("share", "given", "already", "expected"),
    [
        ("300000 100000", None, None, "3"),  # of a container
        ("max 100000", None, None, None),  # torch counts by itself
        ("900000 100000", None, None, None),
        ("300000 100000", 2, None, "2"),  # of a process of several
        ("300000 100000", 2, "5", "5"),  # by the user
    ],
)
def test_torch_is_to_take_no_more_threads_than_a_container_lets_it(
    tmp_path, monkeypatch, share, given, already, expected
):
    (tmp_path / "cpu.max").write_text(share)
    monkeypatch.setattr(parallel, "CONTAINER_SHARE", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", already or "")
    if already is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    batch.limit_threads(given)
    assert os.environ.get("OMP_NUM_THREADS") == expected


def test_where_no_process_can_be_bound_all_processors_count(monkeypatch, tmp_path):
    monkeypatch.setattr(parallel, "CONTAINER_SHARE", tmp_path / "none")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processors() == 1
