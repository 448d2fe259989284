"""Each planted fault, on a CPU or on fake GPUs, finds the code that it replaces, and its tests."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache

import pytest

from tests import faults
from tests.fakegpu import planted
from tests.faults import ROOT, Fault

FAULTS = (*faults.FAULTS, *planted.FAULTS)
MODULES = faults.modules(ROOT)
every_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


@cache
def functions_of(file: str) -> set[str]:
    """Return the names of the functions in a test file."""
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@every_fault
def test_a_fault_changes_code_that_occurs_once(fault: Fault) -> None:
    _, text = faults.planted(fault, MODULES)
    ast.parse(text)
    assert [*map(ast.dump, faults.code(fault.old))] != [*map(ast.dump, faults.code(fault.new))]


@pytest.mark.parametrize(("old", "where"), [("absent", ""), ("a = 1", ""), ("a = 1", "one.Class")])
def test_code_that_does_not_occur_once_is_no_place(old: str, where: str) -> None:
    text = "a = 1\nclass Class:\n    b = 1\ndef function():\n    a = 1\n"
    fault = Fault("name", "law", old, "pass", (), where)
    with pytest.raises(faults.NotFoundError):
        faults.place(fault, [faults.Module(ROOT, "one", text)])


def test_a_place_is_told_apart_by_its_function_and_keeps_all_other_text() -> None:
    text = "a = 1  # é\ndef function():\n    é = 'é'; a  =  1  # kept\n"
    fault = Fault("name", "law", "a = 1", "if a:\n    a = 2", (), "one.function")
    _, changed = faults.planted(replace(fault, new="a = 2"), [faults.Module(ROOT, "one", text)])
    assert changed == "a = 1  # é\ndef function():\n    é = 'é'; a = 2  # kept\n"
    text = text.replace("é = 'é'; ", "")
    _, changed = faults.planted(fault, [faults.Module(ROOT, "one", text)])
    assert changed == "a = 1  # é\ndef function():\n    if a:\n        a = 2  # kept\n"


def test_a_place_is_found_however_it_is_formatted() -> None:
    fault = Fault("name", "law", "if a(b, 'c'): d = (e)", "d = e", ())
    text = 'if a(\n    b,  # why\n    "c",\n):\n    d = e\n'
    _, changed = faults.planted(fault, [faults.Module(ROOT, "one", text)])
    assert changed == "d = e\n"


def test_an_expression_keeps_its_rank_among_others() -> None:
    fault = Fault("name", "law", "a", "b + c", ())
    _, changed = faults.planted(fault, [faults.Module(ROOT, "one", "d = a * 2\n")])
    assert changed == "d = (b + c) * 2\n"


@every_fault
def test_the_tests_of_a_fault_exist(fault: Fault) -> None:
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert not name or name.partition("[")[0] in functions_of(file), test


def test_no_two_faults_have_one_name() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names))
