"""Wheel, editable install, bare pytest and launching from the repository root all work.

The folders triton_kernels and model_patches have names that others may own at the top level;
these tests make sure that we neither take those names nor lose our own sources.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

SOURCES = {"triton_kernels": "kernels", "model_patches": "patches"}
COPIED = ("pyproject.toml", "README.md", "sglang_kvquant", *SOURCES)


def run(*command, cwd, **env) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1", **env}
    environment.pop("PYTHONPATH", None) if "PYTHONPATH" not in env else None
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True
    )


def checked(*command, cwd, **env) -> str:
    result = run(*command, cwd=cwd, **env)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="session")
def checkout(repository, tmp_path_factory) -> Path:
    """A copy of what is packaged, so that building leaves nothing in the real tree."""
    root = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in COPIED:
        source = repository / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=ignored)
        else:
            shutil.copy(source, root / name)
    return root


@pytest.fixture(scope="session")
def wheel(checkout, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    checked(*pip, "--wheel-dir", directory, checkout, cwd=directory)
    (path,) = directory.glob("sglang_kvquant-*.whl")
    return path


def make_environment(directory: Path, *what) -> Path:
    """A virtual environment that sees this one's packages, with our project installed as given."""
    checked(sys.executable, "-m", "venv", "--without-pip", directory, cwd="/")
    python = directory / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(checked(python, "-c", where, cwd="/").strip())
    parent = Path(sysconfig.get_path("purelib"))
    (site / "parent.pth").write_text(f"{parent}\n")
    for pth in parent.glob("*.pth"):
        # Others' start-up code is needed; an editable install of ours must not answer instead.
        if "sglang_kvquant" not in pth.name + pth.read_text():
            shutil.copy(pth, site / pth.name)
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps")
    checked(*pip, "--no-build-isolation", "--ignore-installed", *what, cwd="/")
    return python


@pytest.fixture(scope="session")
def wheel_python(wheel, tmp_path_factory) -> Path:
    return make_environment(tmp_path_factory.mktemp("from_wheel") / "env", wheel)


@pytest.fixture(scope="session")
def editable_python(checkout, tmp_path_factory) -> Path:
    return make_environment(tmp_path_factory.mktemp("editable") / "env", "--editable", checkout)


def test_folders_of_sources_are_no_packages(repository):
    for folder in SOURCES:
        assert not (repository / folder / "__init__.py").exists()


def test_nobody_imports_the_folders_by_their_own_names(repository):
    pattern = re.compile(rf"^\s*(import|from)\s+({'|'.join(SOURCES)})\b", re.MULTILINE)
    for folder in ("sglang_kvquant", *SOURCES, "scripts", "tests"):
        for path in (repository / folder).rglob("*.py"):
            assert not pattern.search(path.read_text()), path


def test_every_package_is_listed(repository):
    with (repository / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    found = {
        ".".join(path.parent.relative_to(repository).parts)
        for path in (repository / "sglang_kvquant").rglob("__init__.py")
    }
    assert listed == found | {f"sglang_kvquant.{name}._src" for name in SOURCES.values()}


def files_in(folder: Path) -> list[Path]:
    """All files but caches; also the ones that are no Python, such as CUDA sources."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return [path for path in found if "__pycache__" not in path.parts]


@pytest.mark.slow
def test_wheel_carries_all_sources_and_takes_no_foreign_name(wheel, repository):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in SOURCES.items():
        for path in files_in(repository / folder):
            assert f"sglang_kvquant/{package}/_src/{path.name}" in names
    for path in files_in(repository / "sglang_kvquant"):
        assert path.relative_to(repository).as_posix() in names
    top_level = {name.split("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"sglang_kvquant"}
    (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
    text = zipfile.ZipFile(wheel).read(entry_points).decode()
    assert "[sglang.srt.plugins]\nkvquant = sglang_kvquant.plugin:register" in text
    assert "sglang-kvquant = sglang_kvquant.cli:main" in text


DESCRIBE = """
import sglang_kvquant, sglang_kvquant.kernels.write as kernel
from importlib.metadata import distribution, entry_points
print(sglang_kvquant.__file__)
print(kernel.__file__)
print([e.value for e in entry_points(group="sglang.srt.plugins") if e.name == "kvquant"])
"""
ENTRY = "['sglang_kvquant.plugin:register']"


@pytest.mark.slow
def test_wheel_install(wheel_python, checkout):
    site = wheel_python.parent.parent
    package, kernel, entry = checked(wheel_python, "-c", DESCRIBE, cwd="/").splitlines()
    assert package.startswith(str(site)) and kernel.startswith(str(site))
    assert kernel.endswith("kernels/_src/write.py") and entry == ENTRY
    # In a checkout Python finds the checkout first, and that works as well.
    package, kernel, entry = checked(wheel_python, "-c", DESCRIBE, cwd=checkout).splitlines()
    assert kernel == str(checkout / "triton_kernels" / "write.py") and entry == ENTRY


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["elsewhere", "from the root"])
def test_editable_install(inside, editable_python, checkout):
    where = checkout if inside else "/"
    package, kernel, entry = checked(editable_python, "-c", DESCRIBE, cwd=where).splitlines()
    assert package == str(checkout / "sglang_kvquant" / "__init__.py")
    assert kernel == str(checkout / "triton_kernels" / "write.py")
    assert entry == ENTRY


FIND = (
    "import importlib.util as u; s = u.find_spec('triton_kernels'); print(s.origin if s else None)"
)


def test_from_the_root_triton_kernels_is_nobody_or_the_real_one(repository, tmp_path):
    """SGLang asks with find_spec; a regular package of that name must win over our folder."""
    probe = (sys.executable, "-c", FIND)
    assert checked(*probe, cwd=repository).strip() in ("None", real_triton_kernels() or "None")
    real = tmp_path / "triton_kernels" / "__init__.py"
    real.parent.mkdir()
    real.touch()
    found = checked(*probe, cwd=repository, PYTHONPATH=str(tmp_path)).strip()
    assert found == str(real)


def real_triton_kernels() -> str | None:
    """OpenAI's package, where sglang-kernel is installed."""
    path = Path(sysconfig.get_path("purelib")) / "triton_kernels" / "__init__.py"
    return str(path) if path.exists() else None


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.parametrize("kind", ["wheel", "editable", "editable, from the root"])
def test_launch_server_shows_our_flags(kind, request, checkout):
    pytest.importorskip("sglang")
    python = request.getfixturevalue(f"{kind.split(',')[0]}_python")
    where = checkout if "root" in kind else "/"
    text = checked(python, "-m", "sglang.launch_server", "--help", cwd=where)
    for flag in ("--kv-quant METHOD", "--kv-quant-checkpoint FILE", "--kv-quant-sink-tokens N"):
        assert flag in text


@pytest.mark.slow
def test_bare_pytest_collects_everything_from_the_root(repository):
    script = Path(sys.executable).parent / "pytest"
    result = run(script, "--collect-only", "-q", "-p", "no:cacheprovider", cwd=repository)
    assert result.returncode == 0, result.stdout[-3000:]
    assert "tests/packaging/test_install.py::test_wheel_install" in result.stdout
