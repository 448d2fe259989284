"""Trees: the copies have the code of their side, leave the checkout alone, and are removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.gating.trees import copies
from dpbench.records.errors import UsageError
from tests.gating.projects import commit, git, project


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return project(tmp_path / "project")


def test_each_copy_has_the_code_of_its_side(repository: Path) -> None:
    commit(repository, {"kept.py": "1", "gone.py": "1", "both.py": "new"})
    (repository / "kept.py").write_text("2")
    (repository / "gone.py").unlink()
    (repository / "fresh.py").write_text("3")
    with copies("base", repository) as (base, head):
        assert not (base.folder / "kept.py").exists()
        assert not (base.folder / "fresh.py").exists()
        assert (head.folder / "kept.py").read_text() == "2"
        assert (head.folder / "both.py").read_text() == "new"
        assert (head.folder / "fresh.py").read_text() == "3"
        assert not (head.folder / "gone.py").exists()
        assert (base.changes, head.changes) == (0, 3)


def test_ignored_files_are_those_of_the_checkout_and_stay(repository: Path) -> None:
    (repository / "data" / "raw").mkdir(parents=True)
    (repository / "data" / "raw" / "images").write_text("many")
    with copies("base", repository) as trees:
        for tree in trees:
            assert (tree.folder / "data" / "raw" / "images").read_text() == "many"
            assert tree.linked == ("data",)
    assert (repository / "data" / "raw" / "images").read_text() == "many"


def test_nothing_is_left_and_nothing_changes(repository: Path) -> None:
    commit(repository, {"staged.py": "1"})
    (repository / "staged.py").write_text("2")
    git(repository, "add", "staged.py")
    (repository / "model.py").write_text("3")
    before = git(repository, "status", "--porcelain"), git(repository, "worktree", "list")
    folders: list[Path] = []

    def fail() -> None:
        with copies("base", repository) as trees:
            folders.extend(tree.folder for tree in trees)
            assert all(folder.is_dir() for folder in folders)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not any(folder.exists() for folder in folders)
    assert before == (git(repository, "status", "--porcelain"), git(repository, "worktree", "list"))


def test_a_folder_of_the_project_stays_the_working_folder(repository: Path) -> None:
    commit(repository, {"models/net.py": "1"}, tag="later")
    with copies("later", repository / "models") as (base, _):
        assert base.working == base.folder / "models"
    missing = pytest.raises(UsageError, match="models does not exist")
    with missing, copies("base", repository / "models"):
        pass


def test_a_file_of_the_checkout_is_no_file_of_a_copy(repository: Path) -> None:
    (repository / "data").mkdir()
    (repository / "data" / "sets.py").write_text("1")
    with copies("base", repository) as (base, _):
        base.check([str(base.folder / "model.py"), str(repository / "data" / "sets.py"), __file__])
        with pytest.raises(UsageError, match=r"model\.py"):
            base.check([str(repository / "model.py")])


def test_no_checkout_and_no_commit_are_errors(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no commit 'nowhere'"), copies("nowhere", repository):
        pass
    with pytest.raises(UsageError, match="in no git checkout"), copies("base", tmp_path):
        pass
    shallow = tmp_path / "shallow"
    commit(repository, {"more.py": "1"})
    git(tmp_path, "clone", "--depth", "1", repository.as_uri(), str(shallow))
    with pytest.raises(UsageError, match="--unshallow"), copies("HEAD~1", shallow):
        pass


def test_an_option_is_no_commit(repository: Path) -> None:
    with pytest.raises(UsageError, match="no commit '--help'"), copies("--help", repository):
        pass


def test_a_submodule_must_have_the_same_commit(repository: Path, tmp_path: Path) -> None:
    part = project(tmp_path / "part")
    git(repository, "submodule", "add", str(part), "part")
    commit(repository, {}, tag="with-part")
    with copies("with-part", repository) as trees:
        assert all((tree.folder / "part" / "model.py").exists() for tree in trees)
    commit(part, {"model.py": "new"})
    git(repository / "part", "pull")
    commit(repository, {})
    with pytest.raises(UsageError, match="the submodule part"), copies("with-part", repository):
        pass
