"""Audits the stable ABIs of a wheel: python scripts/audit.py [dist/camox_ops-*.whl]

abi3audit: the Python module uses Python's limited API alone. torch-abi-audit: both parts use torch by its stable ABI
alone; the CUDA part is no Python module, so the abi3 rule holds for `_C` only. Exit status 1 on any finding.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_TORCH = "2.10.0"


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess:
    program = Path(sys.executable).parent / name
    if not program.exists():
        sys.exit(f"audit: {name} is not installed; `make audit` installs it, or pip with requirements/audit.txt")
    return subprocess.run([str(program), *arguments], capture_output=True, text=True)


def python_findings(wheel: Path) -> list[str]:
    done = tool("abi3audit", "--strict", "--report", str(wheel))
    if done.returncode not in (0, 1) or not done.stdout.strip():
        return [f"abi3audit failed: {done.stderr.strip()}"]
    scanned = [entry["result"] for spec in json.loads(done.stdout)["specs"].values() for entry in spec["wheel"]]
    found = [f"abi3audit: {one}" for one in scanned if not one["is_abi3_baseline_compatible"]]
    found += [] if scanned else ["abi3audit: nothing was scanned"]
    print(f"abi3audit: {len(scanned)} binaries scanned, {len(found)} findings")
    return found


def torch_findings(wheel: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        done = tool("torch-abi-audit", "--json", "--check", "both", str(Path(folder) / "camox_ops"))
        if done.returncode not in (0, 1) or not done.stdout.strip():
            return [f"torch-abi-audit failed: {done.stderr.strip()}"]
        report = json.loads(done.stdout)
        for binary in report["extensions"] + report["bundled_libs"]:
            binary["torch"]["min_torch_version"] = oldest_torch(Path(binary["path"]))
    found = judged(report)
    return found or ([f"torch-abi-audit: {done.stderr.strip()}"] if done.returncode else [])


def needed_symbols(binary: Path) -> list[str]:
    """What the binary cannot be loaded without: weak symbols are called only where a newer torch has them."""
    listed = subprocess.run(["nm", "-D", "--undefined-only", str(binary)], capture_output=True, text=True, check=True)
    symbols = [line.split() for line in listed.stdout.splitlines()]
    return [name.split("@", 1)[0] for kind, name in symbols if kind == "U"]


def oldest_torch(binary: Path) -> str:
    """The oldest torch that the binary can be loaded with; torch-abi-audit itself counts weak symbols too."""
    from torch_abi_audit.torch_abi import classify_symbols

    return classify_symbols(needed_symbols(binary)).min_torch_version


def judged(report: dict) -> list[str]:
    """The findings in torch-abi-audit's report of the package."""
    modules, libraries = report["extensions"], report["bundled_libs"]
    found = [] if modules else ["torch-abi-audit: found no Python module"]
    for binary in modules + libraries:
        name, torch_use = Path(binary["path"]).name, binary["torch"]
        if binary["error"]:
            found.append(f"torch-abi-audit: {name}: {binary['error']}")
        if torch_use["unstable_symbols"] or not torch_use["stable"]:
            found.append(f"torch-abi-audit: {name} uses torch outside its stable ABI: {torch_use['unstable_symbols']}")
        if torch_use["min_torch_version"] != OLDEST_TORCH:
            found.append(f"torch-abi-audit: {name} needs torch {torch_use['min_torch_version']}, not {OLDEST_TORCH}")
        if binary["cpython"]["violations"] or (binary in modules and not binary["cpython"]["compliant"]):
            found.append(f"torch-abi-audit: {name} is not abi3: {binary['cpython']['violations']}")
        verdict = "STABLE" if torch_use["stable"] else "UNSTABLE"
        print(f"torch-abi-audit: {name}: {verdict}, min-torch {torch_use['min_torch_version']}")
    return found


def main(arguments: list[str]) -> int:
    wheels = [Path(name) for name in arguments] or sorted((ROOT / "dist").glob("camox_ops-*.whl"))
    if len(wheels) != 1:
        sys.exit(f"audit: needs one wheel, found {len(wheels)}; `make wheel` makes one in dist")
    found = python_findings(wheels[0]) + torch_findings(wheels[0])
    for finding in found:
        print(finding, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
