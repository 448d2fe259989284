"""Each planted fault, on a CPU or on fake GPUs, finds the code that it replaces, and its tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace

import pytest

from tests import faults
from tests.fakegpu import planted
from tests.faults import ROOT, Fault

FAULTS = (*faults.FAULTS, *planted.FAULTS)
MODULES = faults.modules(ROOT)
every_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


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


@pytest.mark.slow
def test_the_tests_of_every_fault_exist() -> None:
    """They are asked of pytest, because `make faults` runs none if it does not know one of them."""
    tests = {test for fault in FAULTS for test in fault.tests}
    assert all(fault.tests for fault in FAULTS)
    files = sorted({test.partition("::")[0] for test in tests})
    asked = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "--all", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    known = {line for line in asked.stdout.splitlines() if "::" in line}
    known |= {test.partition("[")[0] for test in known} | {*files}
    assert not tests - known, asked.stdout[-2000:]


def test_no_two_faults_have_one_name() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names))
