"""Each fault of `make faults` still finds the text that it replaces, and its tests."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests import faults
from tests.faults import FAULTS, ROOT, Fault

SOURCES = faults.sources(ROOT)
every_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


@cache
def functions_of(file: str) -> set[str]:
    """Return the names of the functions in a test file."""
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@every_fault
def test_a_fault_replaces_code_that_occurs_once_and_changes_it(fault: Fault) -> None:
    path = faults.place(fault, SOURCES)
    assert fault.new != fault.old
    ast.parse(SOURCES[path].replace(fault.old, fault.new))  # a syntax error would be caught by any test


@every_fault
def test_the_tests_of_a_fault_exist(fault: Fault) -> None:
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert not name or name.partition("[")[0] in functions_of(file), test


def test_no_two_faults_have_one_name() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names))
