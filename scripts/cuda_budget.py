"""Holds every CUDA kernel's machine code against the budget in csrc/cuda_budget.json.

    python scripts/cuda_budget.py                       # compiles csrc/*/*_cuda.cu for every architecture and checks it
    python scripts/cuda_budget.py --binary dist/X.whl   # checks what a wheel, or libcamox_ops_cuda.so, holds
    python scripts/cuda_budget.py --update              # writes the table again after a wanted change, or from --binary
    python scripts/cuda_budget.py --update --ops edge   # compiles and writes the kernels of one op family alone
    python scripts/cuda_budget.py --update --ops edge --archs sm_80   # and of one architecture, which takes seconds

Red when a kernel takes more registers or shared memory than its line, spills or touches local memory (on UNTUNED
architectures: more of it than its line has, in bytes of stack and accesses), has lost an
access that its line claims (LDG.E.128, STG.E.128, HMMA), is missing, or has no line; and when a kernel of vectors, by
its name kernel<element, lanes, ...> with lanes of 16 bytes, does not move them in one access. --update refuses all of
that but what it is there to change. The table also holds, for reading only, what follows from the numbers: the warps
that a multiprocessor holds, and the bytes that they load from global memory in one turn of the kernel's main loop.

Needs nvcc of a CUDA toolkit that knows the architectures (12.8 for sm_100 and sm_120), unless a binary is given, and
cuobjdump and nvdisasm: of the toolkit, or from requirements/audit.txt, or by
`pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "csrc" / "cuda_budget.json"
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
OPS = sorted(path.parent.name for path in (ROOT / "csrc").glob("*/*_cuda.cu"))
# Launch bounds were chosen for the others: here a kernel may spill, but no more than its line says.
UNTUNED = ("sm_100", "sm_120")
# What a line of the table may claim, and which instructions are that; cp.async is a load too.
WIDE = {"loads": r"\bLDG(STS)?\.E(\.\w+)*\.128\b", "stores": r"\bSTG\.E(\.\w+)*\.128\b"}
CLAIMS = {"LDG.E.128": WIDE["loads"], "STG.E.128": WIDE["stores"], "HMMA": r"\bHMMA\b"}
ELEMENT_BYTES = {"float": 4, "__half": 2, "__nv_bfloat16": 2}
LIBRARY = "camox_ops/libcamox_ops_cuda.so"
REGISTERS = 65536  # of every multiprocessor since sm_30, handed out in units of 256 a warp
# threads, blocks, KiB of shared memory of a multiprocessor, KiB that the driver takes of it for each block (from sm_90
# on cuobjdump has counted it already)
LIMITS = {
    "sm_75": (1024, 16, 64, 0),
    "sm_80": (2048, 32, 164, 1),
    "sm_86": (1536, 16, 100, 1),
    "sm_90": (2048, 32, 228, 0),
    "sm_100": (2048, 32, 228, 0),
    "sm_120": (1536, 24, 100, 0),
}


def tool(name: str) -> str:
    places = [str(Path(site) / "nvidia" / cuda / "bin") for site in sys.path for cuda in ("cu13", "cu12")]
    places += [os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        sys.exit(f"cuda_budget: {name} not found; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return found


def run(*command: str, cwd: Path | None = None) -> str:
    path = os.pathsep.join([str(Path(tool("nvdisasm")).parent), os.environ["PATH"]])
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, "PATH": path})
    if result.returncode:
        sys.exit(f"cuda_budget: {' '.join(command)}\n{result.stderr}")
    return result.stdout


def compiled(folder: Path, archs, ops) -> list[tuple[str, Path]]:
    """(architecture, cubin) of these ops' kernels, compiled here with the flags of the wheel."""
    nvcc = shutil.which(os.environ.get("CAMOX_NVCC", "nvcc"))
    if nvcc is None:
        sys.exit(
            "cuda_budget: nvcc not found, which a CUDA toolkit has; CAMOX_NVCC names it where it is not on PATH; "
            "--binary checks a wheel without it"
        )
    flags = [nvcc, "-O3", "-std=c++17", "-Werror=all-warnings", "-cubin"]
    jobs = [
        (arch, source, folder / f"{source.stem}.{arch}.cubin")
        for source in (ROOT / "csrc" / op / f"{op}_cuda.cu" for op in ops)
        for arch in archs
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda job: run(*flags, f"-arch={job[0]}", str(job[1]), "-o", str(job[2])), jobs))
    return [(arch, cubin) for arch, _, cubin in jobs]


def extracted(binary: Path, folder: Path) -> list[tuple[str, Path]]:
    """(architecture, cubin) of everything in a shared library or in a wheel that holds one."""
    if binary.suffix == ".whl":
        with zipfile.ZipFile(binary) as wheel:
            binary = Path(wheel.extract(LIBRARY, folder))
    run(tool("cuobjdump"), "-xelf", "all", str(binary.resolve()), cwd=folder)
    cubins = sorted(folder.glob("*.cubin"))
    return [(re.search(r"sm_\d+", cubin.name).group(), cubin) for cubin in cubins]


def holds_kernels(binary: Path) -> bool:
    """Whether a wheel was built where nvcc was; any other file is taken for the library itself."""
    return binary.suffix != ".whl" or LIBRARY in zipfile.ZipFile(binary).namelist()


def listing(sass: str) -> dict[str, list[tuple[int, str]]]:
    """Mangled name -> (address, instruction) of what cuobjdump -sass prints."""
    code = {}
    for part in sass.split("Function : ")[1:]:
        found = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+([^;]+);", part)
        code[part.split("\n", 1)[0].strip()] = [(int(address, 16), text) for address, text in found]
    return code


def resource_usage(cuobjdump: str, cubin: Path) -> dict[str, dict[str, int]]:
    """Mangled name -> REG, STACK, SHARED and LOCAL of each kernel."""
    lines = re.findall(
        r"Function (\S+):\s+(REG:\d+ STACK:\d+ SHARED:\d+ LOCAL:\d+)", run(cuobjdump, "-res-usage", str(cubin))
    )
    return {name: {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", text)} for name, text in lines}


def plain(names: list[str]) -> dict[str, str]:
    """Mangled -> name with its template arguments, without return type and parameters."""
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return {name: re.sub(r"^void |\(.*", "", line) for name, line in zip(names, text.splitlines(), strict=True)}


def main_loop(code: list[tuple[int, str]]) -> list[str]:
    """The instructions of the innermost loop that loads and stores most global memory; all of them where none does."""
    best: list[str] = []
    for address, instruction in code:
        target = re.search(r"\bBRA\S* .*?`?\(?0x([0-9a-f]+)\)?", instruction)
        if not target or int(target.group(1), 16) >= address:
            continue
        body = [text for place, text in code if int(target.group(1), 16) <= place <= address]
        moves = "".join(body).count("LDG") and "".join(body).count("STG")
        if moves and (not best or len(body) < len(best)):
            best = body
    return best or [text for _, text in code]


def narrow(name: str, code: str) -> list[str]:
    """What a kernel whose name promises vectors of 16 bytes does not do with them in one access."""
    vector = re.search(r"<(\w+), (\d+)\b", name)
    if not vector or ELEMENT_BYTES.get(vector[1], 0) * int(vector[2]) != 16:
        return []
    return [access for access, pattern in WIDE.items() if not re.search(pattern, code)]


def loaded_bytes(instructions: list[str]) -> int:
    total = 0
    for text in instructions:
        access = re.search(r"\b(LDG|LDGSTS)\.([\w.]+)", text)
        if access:
            width = re.search(r"\b(?:U|S)?(8|16|64|128)\b", access.group(2).replace(".", " "))
            total += int(width.group(1)) // 8 if width else 4
    return total


def occupancy(arch: str, registers: int, shared: int, threads: int) -> int:
    """Warps that one multiprocessor holds at once."""
    most_threads, most_blocks, kib, reserved = LIMITS[arch]
    warps = -(-threads // 32)
    by_registers = REGISTERS // (-(-registers * 32 // 256) * 256) // warps
    block_shared = shared + reserved * 1024
    by_shared = kib * 1024 // block_shared if block_shared else most_blocks
    return min(most_blocks, most_threads // (warps * 32), by_registers, by_shared) * warps


def measure(arch: str, cubin: Path) -> dict[str, dict]:
    """Kernel -> what its machine code is."""
    cuobjdump, path = tool("cuobjdump"), str(cubin)
    usage = resource_usage(cuobjdump, cubin)
    blocks = dict(
        re.findall(
            r"\.nv\.info\.(\S+)\n(?:(?!\.nv\.info\.).*\n)*?.*EIATTR_MAX_THREADS\n.*\n\s*Value:\s*(0x\w+)",
            run(cuobjdump, "-elf", path),
        )
    )
    code = listing(run(cuobjdump, "-sass", path))
    names = plain(list(usage))
    kernels = {}
    for name, of in usage.items():
        text = "\n".join(instruction for _, instruction in code[name])
        threads = int(blocks.get(name, "0x400"), 16)
        warps = occupancy(arch, of["REG"], of["SHARED"], threads)
        kernels[names[name]] = {
            "registers": of["REG"],
            "shared": of["SHARED"],
            "local": of["STACK"] + of["LOCAL"] + len(re.findall(r"\b(?:LDL|STL)\b", text)),
            "claims": [claim for claim, instruction in CLAIMS.items() if re.search(instruction, text)],
            "narrow": narrow(names[name], text),
            "threads": threads,
            "warps": warps,
            "bytes_in_flight": warps * 32 * loaded_bytes(main_loop(code[name])),
        }
    return kernels


def faults(table: dict, found: dict[str, dict[str, dict]], update: bool) -> list[str]:
    """What is wrong, one line each. found: architecture -> kernel -> measurement."""
    lines = []
    for arch, kernels in found.items():
        for name, kernel in sorted(kernels.items()):
            where, line = f"{name} on {arch}", table.get(name, {})
            if kernel["local"] and arch not in UNTUNED:
                lines.append(f"{where}: spills or uses local memory")
            lines += [f"{where}: no 128-bit {access}" for access in kernel["narrow"]]
            lost = [claim for claim in line.get("claims", []) if claim not in kernel["claims"]]
            if lost:
                lines.append(f"{where}: no {' and no '.join(lost)} any more")
            if update:
                continue
            if arch not in line.get("archs", {}):
                lines.append(f"{where}: not in {TABLE.name}; run with --update")
                continue
            for key in ("registers", "shared", *(["local"] if arch in UNTUNED else [])):
                if kernel[key] > line["archs"][arch].get(key, 0):
                    lines.append(f"{where}: {kernel[key]} {key}, budget {line['archs'][arch].get(key, 0)}")
        if not update:
            for name, line in sorted(table.items()):
                if arch in line["archs"] and name not in kernels:
                    lines.append(f"{name} on {arch}: in {TABLE.name} but not compiled")
    return lines


def new_table(found: dict[str, dict[str, dict]]) -> dict:
    table: dict = {}
    for arch, kernels in sorted(found.items(), key=lambda item: int(item[0][3:])):
        for name, kernel in kernels.items():
            line = table.setdefault(name, {"claims": list(kernel["claims"]), "threads": kernel["threads"], "archs": {}})
            line["claims"] = [claim for claim in line["claims"] if claim in kernel["claims"]]
            keys = ["registers", "shared", *(["local"] if kernel["local"] else []), "warps", "bytes_in_flight"]
            line["archs"][arch] = {key: kernel[key] for key in keys}
    return dict(sorted(table.items()))


def merged(old: dict, new: dict, archs) -> dict:
    """The lines of some kernels, old but for these architectures, which are as in new."""
    lines = {}
    for name in sorted({*old, *new}):
        known, now = old.get(name), new.get(name)
        kept = {arch: of for arch, of in known["archs"].items() if arch not in archs} if known else {}
        measured = {**kept, **(now["archs"] if now else {})}
        if not measured:
            continue
        line = dict(now or known)
        if kept and now:
            line["claims"] = [claim for claim in known["claims"] if claim in now["claims"]]
        line["archs"] = dict(sorted(measured.items(), key=lambda item: int(item[0][3:])))
        lines[name] = line
    return lines


def of_ops(table: dict, ops) -> dict:
    """The lines of the kernels that the sources of these ops name, or that have an op's name as their last argument."""
    sources = (path.read_text() for op in ops for path in (ROOT / "csrc" / op).glob("*.*"))
    named = {word for text in sources for word in re.findall(r"\w+", text)}
    tagged = tuple(f", {op}>" for op in ops)
    return {name: line for name, line in table.items() if name.endswith(tagged) or name.split("<")[0] in named}


def written(table: dict) -> str:
    """JSON with one line for each kernel and architecture."""
    text = json.dumps(table, indent=2)
    return (
        re.sub(r"\{\n\s+(\"registers\"[^}]*?)\n\s+\}", lambda m: "{" + re.sub(r"\n\s+", " ", m[1]) + "}", text) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", type=Path, help="a wheel or libcamox_ops_cuda.so; default: compile the sources")
    parser.add_argument("--archs", default=",".join(ARCHS), help="architectures to compile (default: all)")
    parser.add_argument("--ops", default=",".join(OPS), help="folders of the ops to compile (default: all)")
    parser.add_argument("--update", action="store_true", help="write the table")
    arguments = parser.parse_args()
    archs, ops = arguments.archs.split(","), arguments.ops.split(",")
    if set(archs) - set(ARCHS):
        parser.error(f"--archs: some of {', '.join(ARCHS)}")
    if set(ops) - set(OPS) or (arguments.binary and set(ops) != set(OPS)):
        parser.error(f"--ops: some of {', '.join(OPS)}; --binary has all of them")

    binary = arguments.binary
    if binary and not holds_kernels(binary):
        print(f"cuda_budget: {binary.name} was built without nvcc: it has no kernels to check")
        return
    found: dict[str, dict[str, dict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        cubins = extracted(binary, Path(folder)) if binary else compiled(Path(folder), archs, ops)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for (arch, _), kernels in zip(cubins, pool.map(lambda job: measure(*job), cubins), strict=True):
                found.setdefault(arch, {}).update(kernels)
    if binary and arguments.update and set(found) != set(ARCHS):
        sys.exit(f"cuda_budget: --update needs a binary for {', '.join(ARCHS)}, this one is for {', '.join(found)}")
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    lines = table if set(ops) == set(OPS) else of_ops(table, ops)
    wrong = faults(lines, found, arguments.update)
    if wrong:
        sys.exit("\n".join(wrong))
    if arguments.update:
        # Those of kernels that no source names any more go.
        others = {name: line for name, line in of_ops(table, OPS).items() if name not in lines}
        TABLE.write_text(written(dict(sorted({**others, **merged(lines, new_table(found), found)}.items()))))
    kernels = {name for names in found.values() for name in names}
    state = "written" if arguments.update else "within budget"
    print(f"cuda_budget: {len(kernels)} kernels on {', '.join(found)}: {state}")


if __name__ == "__main__":
    main()
