"""The package builds from an sdist, holds its mapped folders, and starts without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lpes_bake import __version__
from tests.conftest import ROOT


def run(*arguments: str, cwd: Path, path: Path | None = None) -> str:
    """Run this Python from another folder: the repository root would shadow what is installed."""
    environment = {**os.environ, "PYTHONPATH": str(path)} if path is not None else dict(os.environ)
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from an sdist."""
    out = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    (built,) = out.glob("*.whl")
    assert list(out.glob("*.tar.gz"))
    return built


def test_the_wheel_holds_every_module_and_template_once(wheel: Path) -> None:
    packed = sorted(name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name)
    tops = ("search", "modeling", "templates")
    own = [f for f in (ROOT / "lpes_bake").rglob("*.py") if not {*tops} & {*f.relative_to(ROOT).parts}]
    own += [f for f in (ROOT / "lpes_bake" / "lm_eval_tasks").iterdir() if f.is_file() and f.suffix != ".py"]
    mapped = [f for top in tops for f in (ROOT / top).rglob("*") if f.suffix in (".py", ".jinja", ".md")]
    expected = [str(f.relative_to(ROOT)) for f in own] + [f"lpes_bake/{f.relative_to(ROOT)}" for f in mapped]
    assert packed == sorted([*expected, "lpes_bake/py.typed"])


def test_the_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel), cwd=tmp_path)
    where = run("-c", "import lpes_bake.search.curve as c; print(c.__file__)", cwd=tmp_path, path=site)
    assert where.startswith(str(site))
    assert "lpes-bake search MODEL" in run("-m", "lpes_bake", "--help", cwd=tmp_path, path=site)


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], *([c, "--help"] for c in ("search", "bake", "compare", "push"))]
)
def test_help_and_version_do_not_import_torch(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom lpes_bake.cli import main\n"
        f"try:\n    main({arguments!r}, prog_name='lpes-bake')\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & {*sys.modules}, 'imported'\n"
    )
    said = run("-c", code, cwd=tmp_path)
    assert (__version__ in said) if arguments == ["--version"] else said.startswith("Usage: lpes-bake")
