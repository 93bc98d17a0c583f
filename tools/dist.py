"""Build wheel and sdist, check both, install the wheel into an empty environment, and run the README's first script there."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What it prints; an error ends everything."""
    # The sources of this checkout must not stand in for what was installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """Each step says what it found."""
    shutil.rmtree(DIST, ignore_errors=True)
    # The wheel is built from the sdist, so that an sdist without a file fails here.
    run(sys.executable, "-m", "build", "--outdir", DIST)
    (wheel,), (sdist,) = sorted(DIST.glob("*.whl")), sorted(DIST.glob("*.tar.gz"))
    print(f"Built {wheel.name} ({wheel.stat().st_size // 1024} kB) and {sdist.name} ({sdist.stat().st_size // 1024} kB).")
    print(run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist).strip())
    script = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    if script is None:
        sys.exit("README.md has no script")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "empty", with_pip=True)
        python = place / "empty" / "bin" / "python"
        install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*install, wheel, cwd=place)
        installed = run(python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check", cwd=place).split()
        print(f"Installed into an empty environment: {', '.join(installed)}.")
        (place / "script.py").write_text(script[1], encoding="utf-8")
        # Warnings are errors, but for that of torch without numpy, which the library does not need.
        print(run(python, "-W", "error", "-W", "ignore:Failed to initialize NumPy", "script.py", cwd=place).strip())
    print("The README's script ran from the wheel.")


if __name__ == "__main__":
    main()
