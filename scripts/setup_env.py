#!/usr/bin/env python3
"""Make a virtual environment with SGLang and this project, on a machine with or without a GPU.

With a GPU: SGLang's own installation (`pip install sglang==VERSION`). Without: the packages that a
CPU server imports, from requirements/, and SGLang without its CUDA dependencies. Running it again
does nothing until one of the inputs changes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SGLANG_VERSIONS = ("0.5.17", "0.5.23")
TORCHVISION = "0.28.0"
INPUTS = (
    "pyproject.toml",
    "requirements",
    "scripts/setup_env.py",
    "scripts/torchvision_cpu_shim.py",
)


def has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listing.returncode == 0 and "GPU" in listing.stdout


def fingerprint(sglang: str, gpu: bool, dev: bool) -> str:
    digest = hashlib.sha256(f"{sglang} {gpu} {dev} {sys.version}".encode())
    for name in INPUTS:
        path = ROOT / name
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def pip(python: Path, *arguments: str) -> None:
    """Run pip in the environment; a failure ends this script with pip's own output."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [str(python), "-m", "pip", "install", "--quiet", *arguments]
    print("  pip install", *arguments, flush=True)
    if subprocess.call(command, env=environment):
        sys.exit(f"setup_env: pip could not install {' '.join(arguments)}; see its output above.")


def install_sglang(python: Path, sglang: str, gpu: bool) -> None:
    if gpu:
        pip(python, f"sglang=={sglang}", "-r", "requirements/common-cpu.txt")
        return
    pip(python, "-r", f"requirements/sglang-{sglang}-cpu.txt")
    pip(python, "--no-deps", f"sglang=={sglang}", f"torchvision=={TORCHVISION}")


def install_shim_if_needed(python: Path) -> None:
    """Repair `import torchvision` beside a CPU-only torch; see torchvision_cpu_shim.py."""
    probe = [str(python), "-c", "import torchvision"]
    if subprocess.run(probe, capture_output=True).returncode == 0:
        return
    where = subprocess.check_output(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
    )
    site = Path(where.strip())
    shutil.copy(ROOT / "scripts" / "torchvision_cpu_shim.py", site / "torchvision_cpu_shim.py")
    (site / "torchvision_cpu_shim.pth").write_text("import torchvision_cpu_shim\n")
    subprocess.check_call(probe)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--sglang", default=SGLANG_VERSIONS[0], choices=SGLANG_VERSIONS)
    parser.add_argument("--dev", action="store_true", help="also the tools for tests and lint")
    args = parser.parse_args()
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        sys.exit(f"setup_env: Python 3.11 or 3.12 is needed, this is {sys.version.split()[0]}.")
    os.chdir(ROOT)
    gpu, stamp = has_gpu(), args.venv / "kvquant-installed"
    wanted = fingerprint(args.sglang, gpu, args.dev)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    kind = "with a GPU" if gpu else "without a GPU"
    what = f"SGLang {args.sglang} {kind} into {args.venv}"
    print(f"Installing {what} (minutes, several GB)", flush=True)
    if not (args.venv / "bin" / "python").exists():
        venv.create(args.venv, with_pip=True)
    python = args.venv / "bin" / "python"
    install_sglang(python, args.sglang, gpu)
    if args.dev:
        pip(python, "-r", "requirements/dev.txt")
    pip(python, "--no-deps", "--no-build-isolation", "--editable", ".")
    install_shim_if_needed(python)
    stamp.write_text(wanted)


if __name__ == "__main__":
    main()
