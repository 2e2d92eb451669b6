"""What the documentation says, works: every ```python block runs, every `make` target, link and anchor exists.

    python scripts/check_docs.py [file.md ...]

The blocks of one file run one after the other in one fresh interpreter, so later ones may use names of earlier ones.
"""

import itertools
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCED = re.MULTILINE | re.DOTALL
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", FENCED)
MAKE = re.compile(r"\bmake ([a-z]+)\b")
LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)|(?:src|srcset|href)=\"([^\"\s]+)\"")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
DOCUMENTS = ("*.md", "docs/*.md", "csrc/README.md", "csrc/*/README.md", "examples/*/README.md")


def program(text: str) -> str:
    """The file's python blocks with everything else as empty lines, so that errors name the line of the file."""
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        code = block.group(1).splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines) + "\n"


def anchors(path: Path) -> set[str]:
    """What a link may name in a page: its headings, as GitHub spells them."""
    headings = HEADING.findall(re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=FENCED))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path, text: str) -> list[str]:
    found = []
    for link in (markdown or html for markdown, html in LINK.findall(text)):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if "://" in link:
            continue
        if not target.exists():
            found.append(f"link to {file}, which does not exist")
        elif anchor and anchor not in anchors(target):
            found.append(f"link to {link}: no such heading")
    return found


def faults_of(path: Path, targets: set[str]) -> list[str]:
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT)
    made = {target for code in CODE.findall(text) for target in MAKE.findall(code)}
    found = [f"{name}: there is no `make {target}`" for target in sorted(made - targets)]
    found += [f"{name}: {fault}" for fault in broken_links(path, text)]
    code = program(text)
    if code.strip():
        with tempfile.TemporaryDirectory() as folder:
            run = f"exec(compile(open({str(Path(folder) / 'blocks.py')!r}).read(), {str(name)!r}, 'exec'), {{}})"
            (Path(folder) / "blocks.py").write_text(code, encoding="utf-8")
            result = subprocess.run([sys.executable, "-c", run], cwd=folder, capture_output=True, text=True)
        if result.returncode:
            found.append(f"{name}: a python block fails\n{result.stderr}")
        print(f"{name}: {len(BLOCK.findall(text))} python blocks ran")
    return found


def main(arguments: list[str]) -> int:
    documents = [Path(name).resolve() for name in arguments] or [
        path for pattern in DOCUMENTS for path in ROOT.glob(pattern)
    ]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # each thread waits for the interpreter of a file
        by_file = list(pool.map(lambda path: faults_of(path, targets), sorted(documents)))
    found = list(itertools.chain(*by_file))
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
