"""The build of the fake GPUs: it reports new symbols, and no source needs a header of NVIDIA."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakegpu import build

SOURCES = [*build.HERE.glob("src/*.cpp"), *build.HERE.glob("plugin/*.cpp")]


def test_a_symbol_that_a_new_torch_needs_is_reported_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "BUILD", tmp_path)
    stubs = build.write_stubs({"cudaQuiteNew", "cusolverDnCreate", "cusparseGetErrorString"})
    out = capsys.readouterr().out
    assert "1 new symbol" in out
    assert "cudaQuiteNew" in out
    assert "cusolverDnCreate" not in out
    defined = stubs.read_text()
    assert 'refuse("cudaQuiteNew", 801)' in defined
    assert 'refuse("cusolverDnCreate", 9)' in defined
    assert "const char* cusparseGetErrorString()" in defined


@pytest.mark.parametrize("source", sorted(SOURCES), ids=lambda path: path.name)
def test_a_source_includes_no_header_of_nvidia(source: Path) -> None:
    lines = source.read_text().splitlines()
    included = [line.split()[1] for line in lines if line.startswith("#include")]
    quoted = {Path(one.strip('"')).name for one in included if one.startswith('"')}
    assert quoted <= {path.name for path in build.HERE.rglob("*.h")}
    assert not [one for one in included if one.startswith(("<cu", "<nv", "<nccl"))]
