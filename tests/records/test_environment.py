"""What a measurement depends on: each fact is compared, told in words, and part of the key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dpbench.records import Case, Trial
from dpbench.records.environment import (
    ACROSS,
    FAKES,
    HIDDEN,
    THREADS,
    UNKNOWN,
    Environment,
    asked_for,
    differences,
    forbidding,
)
from dpbench.records.facts import RunFacts
from dpbench.records.vendors import AMD
from tests.environments import ASKED, CHANGED, FACTS, GPUS, OF_TRIALS, TOLD, facts

CPU = Trial(case=Case(model="mlp", strategy="single", batch_size=8))
HERE = Environment.of(RunFacts.of(FACTS), [CPU])


def test_the_readers_are_tested_with_every_fact() -> None:
    assert {*CHANGED, *OF_TRIALS} == {*TOLD}
    assert all(value is not None for value in vars(HERE).values())


@pytest.mark.parametrize("name", [*CHANGED, *OF_TRIALS])
def test_each_fact_that_differs_is_told_and_forbids_unless_it_is_the_size_of_memory(
    name: str,
) -> None:
    there = (
        Environment.of(RunFacts.of(facts(name)), [CPU])
        if name in CHANGED
        else Environment.of(RunFacts.of(FACTS), [OF_TRIALS[name](CPU)])
    )
    # fake GPUs are another kind of device, too
    (found,) = (one for one in differences(HERE, there) if name != "fakes" or one.name == FAKES)
    assert found.name == TOLD[name]
    assert found.before != found.after
    assert found.forbids is (name != "memory_bytes")
    assert (HERE.key != there.key) is found.forbids
    assert bool(forbidding(there, HERE)) is found.forbids


@pytest.mark.parametrize("name", TOLD)
def test_a_fact_that_is_unknown_in_one_of_them_is_told_and_forbids_nothing(name: str) -> None:
    for before, after in (
        (HERE, replace(HERE, **{name: None})),
        (replace(HERE, **{name: None}), HERE),
    ):
        (found,) = differences(before, after)
        assert (found.name, found.forbids, found.unknown) == (TOLD[name], False, True)
        assert UNKNOWN in (found.before, found.after)
    assert not differences(replace(HERE, **{name: None}), replace(HERE, **{name: None}))


def test_facts_of_earlier_versions_are_unknown_and_none_of_them_is_needed() -> None:
    assert {*vars(Environment.of(RunFacts.of({}))).values()} == {None}
    old = Environment.of(RunFacts.of({"python": "3.11.9", "host": {"cpu": "X"}, "gpus": {}}))
    assert (old.gil, old.build, old.gpus, old.variables) == ("on", None, None, None)
    assert Environment.of(RunFacts.of({"python": "3.13.0"})).gil is None, (
        "it may have been built without"
    )
    rank = Environment.of(RunFacts.of({"software": {"torch": "2.13", "dpbench": "1"}}))
    assert rank.torch == "2.13"


def test_what_the_workers_told_counts_more_than_what_the_run_knew() -> None:
    """Only they load torch, an extension of which may have switched the GIL on."""
    told = {"torch": "2.13.0+cu130", "gil": "on", "cuda": "13.1", "nccl": "2.28", "cudnn": 91100}
    of_workers = Environment.of(
        RunFacts.of({**FACTS, "gil": "off"}), [replace(CPU, provenance=told), CPU]
    )
    assert of_workers.torch == "2.13.0+cu130"
    assert (of_workers.gil, of_workers.cuda, of_workers.nccl) == ("on", "13.1", "2.28")
    assert of_workers.cudnn == "91100"
    mixed = [replace(CPU, provenance={"torch": one}) for one in ("2.13", "2.14", "2.13")]
    assert Environment.of(RunFacts.of(FACTS), mixed).torch == "2.13, 2.14"


@pytest.mark.parametrize(
    ("changed", "alike"),
    [
        ({"gpus": {**GPUS, "gpus": [{**GPUS["gpus"][0], "name": "NVIDIA A100-SXM4"}] * 2}}, True),
        ({"variables": {**FACTS["variables"], "CUDA_VISIBLE_DEVICES": "1,0"}}, True),
        ({"variables": {**FACTS["variables"], "ASV_COMMIT": "abc"}}, True),
        ({"host": {**FACTS["host"], "memory_bytes": 66 * 2**30}}, True),
        ({"host": {**FACTS["host"], "name": "another"}}, True),
        ({"variables": {**FACTS["variables"], "OMP_NUM_THREADS": "4"}}, True),
        ({"variables": {**FACTS["variables"], "CUDA_HOME": HIDDEN}}, True),
        ({"variables": {**FACTS["variables"], "TORCHINDUCTOR_CACHE_DIR": HIDDEN}}, True),
        ({"variables": {}}, False),
    ],
)
def test_what_means_the_same_is_no_difference(changed: dict[str, Any], alike: bool) -> None:
    there = Environment.of(RunFacts.of({**FACTS, **changed}), [CPU])
    assert (not differences(HERE, there)) is alike


def test_only_the_variables_that_differ_are_named() -> None:
    (found,) = differences(HERE, Environment.of(RunFacts.of(facts("variables")), [CPU]))
    assert (found.before, found.after) == ("not set", "NCCL_P2P_DISABLE=1")


def with_variables(**variables: str) -> Environment:
    return Environment.of(RunFacts.of({**FACTS, "variables": variables}), [CPU])


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONMALLOC"])
def test_a_value_of_which_no_hash_was_stored_is_unknown_and_other_variables_still_differ(
    name: str,
) -> None:
    one, other = f"{HIDDEN} sha256:1", f"{HIDDEN} sha256:2"
    (found,) = differences(with_variables(**{name: one}), with_variables(**{name: other}))
    assert found.forbids
    assert not differences(with_variables(**{name: one}), with_variables(**{name: one}))
    for values in ((HIDDEN, one), (one, HIDDEN), (HIDDEN, HIDDEN)):
        before, after = (with_variables(**{name: value}) for value in values)
        (found,) = differences(before, after)
        assert (found.name, found.unknown, found.forbids) == (name, True, False)
        assert found.asked == ("python" if name.startswith("PYTHON") else "variables")
        more = with_variables(**{name: values[1], "NCCL_ALGO": "Ring"})
        assert [one.after for one in forbidding(before, more)] == ["NCCL_ALGO=Ring"]
    (found,) = differences(with_variables(**{name: HIDDEN}), with_variables())
    assert found.forbids, "it was set, whatever its value was"


@pytest.mark.parametrize("name", THREADS)
def test_the_numbers_of_threads_count_in_a_watched_loop_alone(name: str) -> None:
    """Where dpbench measures, it sets both."""
    watched = replace(CPU, provenance={"observed": {"command": "train.py", "reads": {}}})
    runs = [RunFacts.of({**FACTS, "variables": {name: value}}) for value in "14"]
    for trials, unlike in (([CPU], False), ([watched], True)):
        before, after = (Environment.of(run, trials) for run in runs)
        assert bool(forbidding(before, after)) is unlike
        assert (before.key != after.key) is unlike


@pytest.mark.parametrize(
    ("then", "now", "names"),
    [
        ((400, 400), (400,), ["number of GPUs"]),
        ((400, 250), (250, 400, 400), ["number of GPUs"]),
        ((400, 400), (250,), ["number of GPUs", "power limits"]),
        ((400, 250), (400,), ["number of GPUs", "power limits"]),
        ((400, 250), (250, 400), ["power limits"]),
    ],
)
def test_power_limits_are_compared_whatever_the_number_of_gpus(
    then: tuple[float, ...], now: tuple[float, ...], names: list[str]
) -> None:
    before, after = (
        Environment.of(
            RunFacts.of(
                {"gpus": {"gpus": [{"name": "A100", "power_limit_w": watts} for watts in limits]}}
            )
        )
        for limits in (then, now)
    )
    assert [one.name for one in differences(before, after)] == names


def test_each_fact_has_a_name_by_which_it_is_asked_for_but_fake_gpus_are_never_compared() -> None:
    assert {*ACROSS} == {name for fact, name in ASKED.items() if fact != "fakes"}
    for name in ACROSS:
        assert asked_for(name) == asked_for([name.upper()]) == {name}
    with pytest.raises(LookupError, match="unknown fact 'fake-gpus'"):
        asked_for(ASKED["fakes"])


def test_what_belongs_to_the_interpreter_is_asked_for_together() -> None:
    of_python = {fact for fact, name in ASKED.items() if name == "python"}
    assert of_python == {"python", "build", "gil", "python_variables"}
    names = [name for name in ASKED.values() if name != "python"]
    assert len(names) == len({*names}), "every other fact alone"


def test_names_are_given_as_a_list_or_with_commas_and_those_of_amd_mean_the_same_facts() -> None:
    assert asked_for("torch, cuda") == asked_for(["torch", "cuda"]) == {"torch", "cuda"}
    assert asked_for(()) == asked_for("") == frozenset()
    assert asked_for(f"{AMD.runtime},{AMD.collectives}") == {"cuda", "nccl"}


def test_a_name_that_is_no_fact_is_an_error_that_lists_the_facts() -> None:
    with pytest.raises(LookupError, match="did you mean 'torch'") as refused:
        asked_for("torhc")
    assert all(name in str(refused.value) for name in ACROSS)
