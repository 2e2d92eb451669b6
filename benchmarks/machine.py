"""The machine under a benchmark: its name, who else uses it, what its allocator does with freed memory."""

import os
import platform
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.record import OTHER_CPU_LIMIT

KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 46),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "THP_MEM_ALLOC_ENABLE": "1",
}
UNKNOWN_CACHE = 32 << 20
EVICTION_LIMIT = 512 << 20


def busy_seconds() -> float | None:
    """CPU seconds that all processes of this machine, and its host where it steals, have used; None where not known."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class OtherCpu:
    """Cores that other processes use between creation and ``cores()``; 0 where the system does not say."""

    def __init__(self):
        self._wall, self._busy, self._own = time.monotonic(), busy_seconds(), time.process_time()

    def cores(self) -> float:
        busy = busy_seconds()
        if busy is None:
            return 0.0
        own = time.process_time() - self._own
        return max(0.0, (busy - self._busy - own) / max(time.monotonic() - self._wall, 1e-9))


def wait_for_quiet(seconds: float) -> None:
    """Returns after one second in which no other process used the machine, or after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        others = OtherCpu()
        time.sleep(1.0)
        if others.cores() <= OTHER_CPU_LIMIT:
            return


def last_level_cache() -> int:
    """Bytes of the largest cache of the first CPU; UNKNOWN_CACHE where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        digits, unit = re.fullmatch(r"(\d+)([KMG]?)\s*", path.read_text()).groups()
        sizes.append(int(digits) << {"": 0, "K": 10, "M": 20, "G": 30}[unit])
    return max(sizes, default=UNKNOWN_CACHE)


class Eviction:
    """Makes the caches cold: calling it writes memory of three times the last-level cache.

    A virtual machine reports the size of a cache that it shares with others: more than EVICTION_LIMIT is not written.
    With a cache of 480 MiB, the bandwidth of a copy falls until 256 MiB are written before it, and not after that.
    """

    def __init__(self):
        self.cache = last_level_cache()
        self.written = min(3 * self.cache, EVICTION_LIMIT)
        self._memory = torch.zeros(self.written, dtype=torch.uint8)

    def __call__(self):
        self._memory.fill_(1)

    def facts(self) -> dict:
        return {"last_level": self.cache, "written_between_calls": self.written}


def cpu_field(name: str) -> str:
    """What the system says of its first processor, "" where it does not."""
    try:
        found = re.search(rf"^{name}\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found.group(1).strip() if found else ""


def vector_units(capability: str) -> str:
    """The instruction set, and whose AVX-512 takes two steps: AMD's family 25 is Zen 3, without it, and Zen 4."""
    halves = capability == "AVX512" and (cpu_field("vendor_id"), cpu_field("cpu family")) == ("AuthenticAMD", "25")
    return "ZEN4" if halves else capability


def name_of(cpu: str, cores: int, capability: str) -> str:
    """A file-name part such as ``amd-epyc-2c`` or ``intel-xeon-gold-6248-16c``; says what is less than whole AVX-512.

    A virtual machine calls every generation of a processor by one name: neither ``amd-epyc-avx2-2c`` nor
    ``amd-epyc-zen4-2c`` is ``amd-epyc-2c``.
    """
    text = re.sub(r"\((?:r|tm|c)\)|@.*$|\b(?:cpu|processor|\d+-core)\b", " ", cpu.lower())
    words = re.findall(r"[a-z0-9]+", text)[:5] or ["cpu"]
    if capability != "AVX512":
        words.append(capability.lower())
    return f"{'-'.join(words)}-{cores}c"


def facts() -> dict:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpu = cpu_field("model name") or platform.processor() or platform.machine()
    try:
        governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
    except OSError:
        governor = "unknown"
    name = name_of(cpu, cores, vector_units(torch.backends.cpu.get_cpu_capability()))
    return {"name": name, "cpu": cpu, "cores": cores, "governor": governor}


def git_state(root: Path) -> tuple[str, bool]:
    """Commit of ``root`` and whether its code differs from it; ("unknown", True) outside a repository."""
    code = ("camox_ops", "csrc", "setup.py", "benchmarks/*.py")

    def git(*arguments):
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout

    try:
        return git("rev-parse", "HEAD").strip(), bool(git("status", "--porcelain", "--", *code).strip())
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True


def python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def package_facts() -> tuple[str, str]:
    """Version and instruction set of the camox_ops that is measured, "unknown" where it does not say."""
    try:
        import camox_ops
    except ImportError:
        return "none", "none"
    isa = getattr(camox_ops, "isa", None)
    return str(getattr(camox_ops, "__version__", "unknown")), str(isa()) if callable(isa) else "unknown"


def reuse_page_faults() -> int:
    """Page faults of filling 40 MiB that were just freed: about none when the allocator keeps freed memory."""
    counts = []
    for _ in range(12):  # glibc's memalign needs a few rounds until a freed block has the slack to be taken again
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(10 << 20).fill_(1.0)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts[1:])


def keep_freed_memory() -> str | None:
    """Makes this process keep freed memory; what did it, or None when it takes a new process with KEEP_FREED_MEMORY."""
    if all(os.environ.get(name) == value for name, value in KEEP_FREED_MEMORY.items()):
        return "environment " + " ".join(f"{name}={value}" for name, value in KEEP_FREED_MEMORY.items())
    try:
        from camox_ops.train import tune_cpu_allocator
    except ImportError:
        return None
    tune_cpu_allocator()
    return "camox_ops.train.tune_cpu_allocator()" if reuse_page_faults() <= 8 else None
