"""Work is shared out by bytes, evenly, and the same whoever computes it and in whatever order."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_affine.plan.conversion import ConversionPlan, CopiedFile, ObjectFile, TensorFile
from deepspeed_affine.plan.sharing import FILE_BYTES, share_files, shares

NAMES = st.text(alphabet="ab.é", min_size=1, max_size=4)
ITEMS = st.dictionaries(NAMES, st.integers(0, 1000) | st.just(10**12), max_size=30)


def loads(items, dealt):
    return [sum(items[name] for name in names) for names in dealt]


@given(ITEMS, st.integers(1, 9))
def test_every_item_is_dealt_once_and_no_share_is_much_above_the_average(items, count):
    dealt = shares(items, count)
    assert len(dealt) == count
    assert sorted(name for names in dealt for name in names) == sorted(items)
    largest = max(items.values(), default=0)
    assert count * max(loads(items, dealt)) <= sum(items.values()) + (count - 1) * largest


@given(ITEMS, st.integers(1, 9), st.randoms(use_true_random=False))
def test_the_order_of_the_items_does_not_matter(items, count, order):
    shuffled = list(items.items())
    order.shuffle(shuffled)
    assert shares(dict(shuffled), count) == shares(items, count)


def test_what_is_too_large_to_share_stays_whole_and_alone():
    dealt = shares({"embedding": 100, **{f"p{n}": 1 for n in range(20)}}, 3)
    assert dealt[0] == ("embedding",)
    assert [len(names) for names in dealt[1:]] == [10, 10]


def tensor(param, state, numel):
    return TensorFile(f"zero/{param}/{state}.pt", param, state, "float32", 4, (numel,), (numel,), (), "param", ())


def plan_of(numels, copies=(), objects=()):
    tensors = [
        tensor(param, state, numel) for param, numel in numels.items() for state in ("fp32", "exp_avg", "exp_avg_sq")
    ]
    steps = [ObjectFile(f"zero/{param}/step.pt", None, 300, (), param, "step") for param in numels]
    return ConversionPlan(
        (),
        tuple(tensors),
        (*steps, *(ObjectFile(path, None, nbytes) for path, nbytes in objects)),
        tuple(CopiedFile(path, f"/source/{path}", nbytes) for path, nbytes in copies),
    )


def file_sizes(plan):
    files = [*plan.tensors, *plan.objects, *plan.copies]
    return {file.path: file.nbytes + FILE_BYTES for file in files}


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("seed", range(5))
def test_files_of_a_model_are_shared_out_evenly(count, seed):
    numbers = random.Random(seed)
    numels = {f"layers.{n}.weight": numbers.randrange(10**7) for n in range(60)}
    numels["embedding"] = numbers.choice([10**6, 10**8])
    plan = plan_of(numels, copies=[(f"mp_rank_{n:02d}_model_states.pt", 5 * 10**7) for n in range(4)])
    sizes = file_sizes(plan)
    dealt = share_files(plan, count)
    assert sorted(path for paths in dealt for path in paths) == sorted(sizes)
    part = sum(sizes.values()) / count
    found = [sum(sizes[path] for path in paths) for paths in dealt]
    # Dealt are single files, and the four of a parameter where they are no more than a part.
    largest_file = max(sizes.values())
    largest_item = max(largest_file, min(part, 4 * largest_file))
    assert max(found) <= max(part, largest_file) + largest_item


def test_states_of_a_parameter_stay_together_unless_they_are_more_than_a_part():
    plan = plan_of({"big": 3 * 10**6, **{f"p{n}": 10**5 for n in range(6)}}, objects=[("zero/optimizer_state.pt", 99)])
    dealt = share_files(plan, 4)
    writers = {}
    for process, paths in enumerate(dealt):
        for path in paths:
            writers.setdefault(path.split("/")[1], set()).add(process)
    assert {param: len(found) for param, found in writers.items() if param != "big"} == dict.fromkeys(
        [*(f"p{n}" for n in range(6)), "optimizer_state.pt"], 1
    )
    assert len(writers["big"]) > 1


def test_what_is_finished_already_is_nobodys_and_the_rest_is_even_again():
    plan = plan_of({f"p{n}": 10**6 for n in range(8)})
    finished = share_files(plan, 2)[0]
    dealt = share_files(plan, 2, finished)
    assert finished.isdisjoint(dealt[0] | dealt[1])
    assert {*finished, *dealt[0], *dealt[1]} == {*plan.paths}
    assert len(dealt[0]) == len(dealt[1])


def test_more_processes_than_files_leave_some_without():
    dealt = share_files(plan_of({"p": 1}), 9)
    assert sorted(map(len, dealt)) == [0, 0, 0, 0, 0, 1, 1, 1, 1]
