"""``pip install`` gives a wheel with the models, its pictures and its metadata, which trains from an empty folder.

Built without a package index, by the setuptools that is there, out of a copy of what git has: what a build leaves behind is not
left here.
"""

from __future__ import annotations

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import jaxpipe
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_readme_shows_and_links_is_in_the_clone() -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", README)
    local_targets = [target for target in targets if "://" not in target]
    assert any(target.endswith(".svg") for target in local_targets)
    assert [target for target in local_targets if not (ROOT / target).exists()] == []
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "github.com/jaxpipe" not in README + project, "there is no such address"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    names = [name for name in listed.decode().split("\0") if name and not name.startswith("tests/")]
    with tarfile.open(folder / "source.tar", "w") as archive:  # which keeps links
        for name in names:
            if os.path.lexists(ROOT / name):
                archive.add(ROOT / name, name)
    with tarfile.open(folder / "source.tar") as archive:
        archive.extractall(folder / "source", filter="data")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(folder / "source")]
    version = importlib.util.find_spec("setuptools") and importlib.import_module("setuptools").__version__
    if version and int(version.partition(".")[0]) >= 77:
        pip.append("--no-build-isolation")
    result = subprocess.run(pip, capture_output=True, text=True, check=False)
    if result.returncode and "--no-build-isolation" not in pip:
        pytest.skip(f"no setuptools of version 77 here, and none to be had: {result.stderr[-200:]}")
    assert result.returncode == 0, result.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.soak
def test_the_wheel_holds_what_it_should(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith("/METADATA"))
        fields = email.message_from_bytes(archive.read(metadata))
    models = {f"jaxpipe/models/{path.name}" for path in (ROOT / "models").glob("*.py")}
    assert models <= names and "jaxpipe/models/README.md" in names
    assert {"jaxpipe/py.typed", "jaxpipe/plot/viewer.html", "jaxpipe/plot/viewer.js"} <= names
    assert {name.partition("/")[0] for name in names} == {"jaxpipe", metadata.partition("/")[0]}
    assert fields["Version"] == jaxpipe.__version__
    assert fields["License-Expression"] == "Apache-2.0" and fields["Author"] and fields["Keywords"]
    assert "Typing :: Typed" in fields.get_all("Classifier")


@pytest.mark.soak
def test_what_is_installed_trains_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """The wheel is in a virtual environment of its own, which sees the packages of this one but not this checkout."""
    venv, folder = tmp_path / "venv", tmp_path / "empty"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = venv.glob("lib/*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    packages = [path for path in map(Path, sys.path) if path.name in ("site-packages", "dist-packages")]
    (site / "others.pth").write_text(
        "".join(f"{path}\n" for path in packages)
    )  # a line of code in a .pth is not followed
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def call(*argv: str) -> str:
        result = subprocess.run(
            [str(venv / "bin" / "python"), "-P", "-m", "jaxpipe", *argv],
            cwd=folder, env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout

    (folder / "text.txt").write_text("the cat sat on the mat\n" * 300)
    tiny = "{d_model=16,num_layers=2,num_heads=2}"
    call("train", "--pp", "2", "run.steps=2", "data.path=text.txt", "data.seq_len=16", f"model.options={tiny}",
         "run.batch=8", "pipeline.microbatches=2", "run.eval_every=0", "run.out_dir=run", "run.platform=cpu")  # fmt: skip
    assert "step 2" in call("eval", "run")
    shutil.rmtree(folder / "run")
