"""The example of a third party's adapter works as installed, and the guide quotes it word for word."""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "adapter_package"
GUIDE = ROOT / "docs" / "write-an-adapter.md"
QUOTE = re.compile(r"<!-- (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the example is installed, so that its entry point is a real one."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(folder)]
    _run([*command, str(EXAMPLE)], {})
    return folder


def _run(command: list[str], more: dict[str, str]) -> str:
    """The output of a command that must succeed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH"))}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **more}
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def _adapters(more: dict[str, str]) -> list[str]:
    script = "from dynadapt.cli import main; main()"
    out = _run([sys.executable, "-c", script, "env", "--json"], more)
    return [adapter["name"] for adapter in json.loads(out)["adapters"]]


def test_dynadapt_lists_it_where_it_is_installed_and_only_there(site: Path) -> None:
    assert "stripes" in _adapters({"PYTHONPATH": str(site)})
    assert "stripes" not in _adapters({})


def test_its_own_tests_pass(site: Path) -> None:
    """As its own project runs them: with its settings, on what is installed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE)]
    out = _run(command, {"PYTHONPATH": str(site)})
    assert re.search(r"^\d+ passed", out, re.MULTILINE), out


def test_its_doctests_pass(site: Path) -> None:
    files = sorted(map(str, (site / "stripes").glob("*.py")))
    _run(
        [sys.executable, "-m", "doctest", *files],
        {"PYTHONPATH": str(site)},
    )


def test_the_guide_quotes_files_word_for_word() -> None:
    quotes = QUOTE.findall(GUIDE.read_text())
    assert len(quotes) > 5
    for path, text in quotes:
        whole = (ROOT / path).read_text()
        found = [textwrap.indent(text, " " * depth) in whole for depth in range(0, 13, 4)]
        assert any(found), f"{path} has no such lines:\n{text}"


def test_the_guide_has_no_other_code_than_quotes_and_doctests() -> None:
    """The doctests share their names, one after the other."""
    text = GUIDE.read_text()
    quoted = {quote for _, quote in QUOTE.findall(text)}
    own = [block for block in PYTHON.findall(text) if block not in quoted]
    names: dict[str, object] = {}
    for block in own:
        test = doctest.DocTestParser().get_doctest(block, names, GUIDE.name, str(GUIDE), 0)
        assert test.examples, f"neither a quote nor a doctest:\n{block}"
        result = doctest.DocTestRunner().run(test, clear_globs=False)
        assert not result.failed, block
        names = test.globs
    assert own


def test_the_guide_tells_every_mistake_and_what_is_said_of_it(site: Path) -> None:
    """By the mistakes that the example's tests try."""
    script = (
        "import json, mutants; print(json.dumps("
        "[[m.kind.__doc__.split('\\n')[0].strip('. '), m.said] for m in mutants.MUTANTS]))"
    )
    paths = os.pathsep.join([str(site), str(EXAMPLE / "tests")])
    mistakes = json.loads(_run([sys.executable, "-c", script], {"PYTHONPATH": paths}))
    assert len(mistakes) > 20
    text = GUIDE.read_text()
    for mistake, said in mistakes:
        assert f"| {mistake} | `{said}`" in text, mistake
