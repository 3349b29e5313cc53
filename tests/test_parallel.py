from __future__ import annotations

import threading

import pytest
import torch

from cascadeseg.parallel import own_threads, side_by_side

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
