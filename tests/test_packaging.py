"""What is shipped is what is in the tree, whatever the top-level links do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKS = ["adapters", "transport", "vps"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _tree() -> set[str]:
    """All files of the package, by their path from the root."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "dynadapt").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_exactly_the_files_of_the_tree(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == _tree()


def test_the_sdist_holds_the_package_once(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = {member.name.split("/", 1)[1] for member in members if member.isfile()}
    assert not [member.name for member in members if not member.isfile()]
    assert {name for name in names if "/" in name} == _tree()
    assert {name for name in names if "/" not in name} == {
        ".gitignore",  # hatchling's own, so that a build from the sdist ignores the same files
        "CHANGELOG.md",
        "LICENSE",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
    }


@pytest.mark.parametrize("name", LINKS)
def test_the_top_level_links_are_relative(name: str) -> None:
    assert os.readlink(ROOT / name) == f"dynadapt/{name}"


@pytest.mark.parametrize("name", ["adapters", "transport"])
def test_the_rooms_have_empty_init_files(name: str) -> None:
    """A re-export there would load torch with the planner, and import-linter would not see it."""
    assert (ROOT / "dynadapt" / name / "__init__.py").read_text() == ""


def test_documents_have_no_placeholders() -> None:
    """A mark left to be filled in is not a document."""
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        assert not re.findall(r"@[A-Z]+@|TODO|FIXME", path.read_text()), path
