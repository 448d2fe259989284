"""Each file is a plug-in; an unknown name is refused with the list of known names."""

from __future__ import annotations

from pathlib import Path

import pytest

import dpbench
from dpbench.records import objects, registry

ROOT = Path(dpbench.__file__).parent
FOLDERS = {"models": "models", "strategies": "strategies", "samplers": "hardware/samplers"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_are_the_files_without_the_private_ones(folder: str) -> None:
    files = sorted(
        p.stem for p in (ROOT / FOLDERS[folder]).glob("*.py") if not p.stem.startswith("_")
    )
    assert registry.own(folder) == files
    assert files


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_name_loads_its_own_file(folder: str) -> None:
    for name in registry.own(folder):
        module = registry.load(folder, name)
        assert Path(module.__file__ or "") == ROOT / FOLDERS[folder] / f"{name}.py"
        registry.check(folder, name)


def test_a_strategy_is_the_object_of_its_file() -> None:
    for name in registry.own("strategies"):
        assert registry.strategy(name) is registry.load("strategies", name).strategy


@pytest.mark.parametrize(
    ("folder", "kind"), [("models", "model"), ("strategies", "strategy"), ("samplers", "sampler")]
)
def test_unknown_names_list_the_known_and_the_nearest(folder: str, kind: str) -> None:
    known = registry.names(folder)
    for verb in (registry.check, registry.load):
        with pytest.raises(LookupError) as caught:
            verb(folder, known[0] + "x")
        message = str(caught.value)
        assert message.startswith(f"unknown {kind} '{known[0]}x'; known: {', '.join(known)}")
        assert f"did you mean '{known[0]}'?" in message
    with pytest.raises(LookupError) as caught:
        registry.check(folder, "zzzzzz")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["", "_tree", "__init__", "__main__", "../records", "mlp.py", "os"]
)
def test_what_is_no_plug_cannot_be_loaded(name: str) -> None:
    for folder in FOLDERS:
        with pytest.raises(LookupError):
            registry.load(folder, name)


def test_a_new_file_is_a_new_plug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ROOT", tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("mine.py", "_shared.py", "notes.txt"):
        (tmp_path / "models" / name).touch()
    assert registry.names("models") == ["mine"]


def test_a_users_module_that_is_not_there_is_refused_without_importing_any(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise AssertionError('imported')\nnet = None\n")
    objects.check("mine:net", "models")
    with pytest.raises(LookupError, match="the package mine has no module deeper"):
        objects.check("mine.deeper:net", "models")
    with pytest.raises(LookupError, match="cannot find the module 'mime' in"):
        objects.check("mime:net", "models")
