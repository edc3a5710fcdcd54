"""Build the wheel, and use it where nothing else of this folder is: `make wheel`.

    python tools/check_wheel.py

The clean environment has what `pip install fsdfm` installs, in the versions of constraints.txt; torch alone, the one
large package, is taken from the environment that runs this, so that no build of it is downloaded a second time.
"""

import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGEST = 80 * 2**20  # bytes; the two embedded models are most of it
LIGHT = "import fsdfm, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'import fsdfm is heavy'"


def run(*words: str | Path, cwd: Path) -> str:
    """Run a command, and stop with all that it said where it fails."""
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout


def share_torch(environment: Path) -> None:
    """Let an environment see the torch of this one, and nothing else of it."""
    installed, seen = Path(sysconfig.get_paths()["platlib"]), environment / "torch-alone"
    seen.mkdir()
    for part in {Path(file).parts[0] for file in distribution("torch").files or ()}:
        if part != ".." and (installed / part).exists():
            (seen / part).symlink_to(installed / part)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "torch-alone.pth").write_text(f"{seen}\n")


def main() -> None:
    """Build, check, install, generate."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run(sys.executable, "-m", "build", "--wheel", "--sdist", "--outdir", place / "dist", ROOT, cwd=place)
        run(sys.executable, "-m", "twine", "check", "--strict", *(place / "dist").iterdir(), cwd=place)
        (wheel,) = (place / "dist").glob("*.whl")
        if wheel.stat().st_size > LARGEST:
            sys.exit(f"{wheel.name} has {wheel.stat().st_size:,} bytes; allowed are {LARGEST:,}")
        venv.create(place / "clean", with_pip=True)
        share_torch(place / "clean")
        python = place / "clean" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel, cwd=place)
        run(python, "-m", "pip", "check", cwd=place)
        run(python, "-c", LIGHT, cwd=place)
        text = run(place / "clean" / "bin" / "fsdfm", "generate", "Once upon a time", "--length", "32", cwd=place)
        if not text.startswith("Once upon a time"):
            sys.exit(f"the installed wheel wrote {text!r}")
        run(place / "clean" / "bin" / "fsdfm", "recipe", "list", cwd=place)
        count = len(run(python, "-m", "pip", "list", "--format", "freeze", cwd=place).splitlines())
        sys.stdout.write(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, {count} packages, writes text\n")


if __name__ == "__main__":
    main()
