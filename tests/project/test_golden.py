"""Golden outputs: what the reading commands print for stored runs changes on purpose only."""

from __future__ import annotations

import pytest

from tests import golden

RUNS = golden.runs()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_reading_commands_print_what_is_recorded(name: str) -> None:
    changes = list(golden.differences(name, golden.recorded(name), RUNS[name]()))
    shown = "\n".join(changes[:40])
    assert not changes, (
        f"`python -m tests.golden {name}` prints {len(changes)} changed lines:\n{shown}"
    )


def test_every_recorded_file_belongs_to_a_run() -> None:
    assert {path.name for path in golden.GOLDEN.iterdir()} == {f"{name}.json.xz" for name in RUNS}
