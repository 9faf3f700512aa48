"""Prints `parity` if pip would install a CPU build of the PyTorch that this extra names, else says why not on stderr.

PyTorch's default build for Linux brings gigabytes of CUDA that the comparisons do not need.
"""

import json
import pathlib
import subprocess
import sys
import tomllib


def main() -> int:
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = next(item for item in project["optional-dependencies"]["parity"] if item.startswith("torch"))
    command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed", "--no-deps"]
    result = subprocess.run([*command, "--report", "-", torch], stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        print(f"{torch} cannot be installed: tests against it will be skipped", file=sys.stderr)
        return 0
    (found,) = json.loads(result.stdout)["install"]
    needs = found["metadata"].get("requires_dist", [])
    if any("nvidia" in need or "cuda" in need for need in needs) and sys.platform == "linux":
        print(f"pip would take a CUDA build of {torch}: tests against it will be skipped", file=sys.stderr)
        return 0
    print("parity")
    return 0


if __name__ == "__main__":
    sys.exit(main())
