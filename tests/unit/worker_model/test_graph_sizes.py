"""Which steps are replayed from a graph, and from which."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker_service.forward.graph_sizes import GraphSizes, default_sizes, sizes_to_record


def test_sizes_asked_for_are_recorded_largest_first_and_once() -> None:
    assert sizes_to_record((4, 64, 1, 4, 17), 100) == (64, 17, 4, 1)


def test_sizes_beyond_what_a_step_can_have_are_left_out() -> None:
    assert sizes_to_record((4, 101, 100), 100) == (100, 4)
    assert sizes_to_record((101, 300), 100) == ()


def test_nothing_asked_for_means_the_default() -> None:
    assert sizes_to_record((), 7) == (7, 4, 2, 1)
    assert sizes_to_record((), 24) == (24, 16, 8, 4, 2, 1)
    assert sizes_to_record((), 4096)[0] == 512


@given(st.integers(1, 2000), st.integers(1, 512))
def test_default_sizes_hold_every_step_up_to_the_largest_with_little_padding(largest: int, num_reqs: int) -> None:
    sizes = default_sizes(largest)
    assert list(sizes) == sorted(set(sizes), reverse=True)
    assert sizes[0] == min(largest, 512)
    assert sizes[-1] == 1
    if num_reqs <= sizes[0]:
        size = GraphSizes(sizes).dispatch(num_reqs, num_reqs).size
        assert size is not None
        assert num_reqs <= size < num_reqs + max(8, num_reqs // 4 + 1, 3)


@given(st.sets(st.integers(1, 64), min_size=1), st.integers(1, 80))
def test_the_smallest_graph_that_holds_a_step_is_taken(sizes: set[int], num_reqs: int) -> None:
    fitting = [size for size in sizes if size >= num_reqs]
    dispatch = GraphSizes(sizes).dispatch(num_reqs, num_reqs)
    assert dispatch.size == (min(fitting) if fitting else None)
    assert dispatch.is_replayed == bool(fitting)
    assert bool(dispatch.reason) == (not fitting)


def test_a_step_with_a_prompt_in_it_runs_kernel_by_kernel() -> None:
    dispatch = GraphSizes((8, 4)).dispatch(3, 4)
    assert dispatch.size is None
    assert dispatch.reason == "some row has more than one token"


def test_without_graphs_everything_runs_kernel_by_kernel() -> None:
    assert not GraphSizes(())
    assert GraphSizes(()).dispatch(1, 1).reason == "no graphs"
