"""What patch did, and why it left modules alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from ._call import LEAST_IN_ROWS

PATCHED_ALREADY = "it is patched already"


@dataclass
class PatchEntry:
    """One module that a recogniser took a closer look at.

    name, of (its class), recogniser; patched: whether the fast forward is in place; reason: why it is not (empty where
    it is). error: the largest difference of the proof in float64, over the largest value. first_error: the same on the
    first real input, in its dtype and from the original in float64; first_torch_error: PyTorch's own there; both None
    until that input came. passed_on: how many calls the original answered before it, as the fast forward serves none of
    them (not counted where no first input is compared); first_passed_on: what the first of them was called with.
    few_operators: on a GPU the original runs for tensors of less than `least_bytes` of the report. slower_in_few_rows:
    in which form its small float32 tensors get the original on the CPU; empty for none."""

    name: str
    of: str
    recogniser: str
    patched: bool
    reason: str = ""
    error: float | None = None
    first_error: float | None = None
    first_torch_error: float | None = None
    passed_on: int = 0
    first_passed_on: str = ""
    few_operators: bool = False
    slower_in_few_rows: str = ""

    def give_back(self, reason: str) -> None:
        self.patched, self.reason = False, reason


@dataclass
class PatchReport:
    """Returned by camox_ops.patch; str() is a table, to_dict() is made of plain numbers and texts.

    least_bytes: from which on a GPU that has the model serves modules in place of `few_operators`; None without one.
    `entries` are kept up to date: a layer that differs on its first real input moves from `patched` to `skipped`."""

    dry_run: bool = False
    verified: bool = True
    entries: list[PatchEntry] = field(default_factory=list)
    least_bytes: int | None = None

    @property
    def patched(self) -> list[PatchEntry]:
        return [entry for entry in self.entries if entry.patched]

    @property
    def skipped(self) -> list[PatchEntry]:
        """Left alone, each with its reason."""
        return [entry for entry in self.entries if not entry.patched]

    @property
    def max_error(self) -> float | None:
        """The largest difference of any patched module in the proofs, in float64; None where nothing was compared."""
        errors = [entry.error for entry in self.patched if entry.error is not None]
        return max(errors, default=None)

    def to_dict(self) -> dict:
        """For json.dumps."""
        return {
            "dry_run": self.dry_run,
            "verified": self.verified,
            "least_bytes": self.least_bytes,
            "max_error": self.max_error,
            "patched": [asdict(entry) for entry in self.patched],
            "skipped": [asdict(entry) for entry in self.skipped],
        }

    def __str__(self) -> str:
        patched, skipped = self.patched, self.skipped
        verb = "would be patched" if self.dry_run else "patched"
        before = sum(entry.reason == PATCHED_ALREADY for entry in skipped)
        lines = [f"{len(patched)} modules {verb}, {len(skipped) - before} left alone"]
        if before:
            lines[0] += f", {before} patched already"
        if not self.entries:
            lines[0] += ": none has a structure that a recogniser looks for"
        rows = [
            (entry.name or "(the model)", entry.of.rpartition(".")[2], entry.recogniser, _outcome(entry))
            for entry in (*patched, *skipped)
        ]
        if rows:
            rows.insert(0, ("module", "class", "recogniser", "outcome"))
            widths = [max(len(row[column]) for row in rows) for column in range(3)]
            for row in rows:
                cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)]
                lines.append("  " + "  ".join([*cells, row[3]]))
        few = dict.fromkeys(entry.recogniser for entry in patched if entry.few_operators)
        if few and self.least_bytes is not None:
            lines.append(
                f"  {', '.join(few)}: on the GPU from tensors of {self.least_bytes / 1e6:.0f} MB on; "
                "smaller ones take it less time than their host, which the originals take less"
            )
        norms = dict.fromkeys(
            f"{entry.recogniser} ({entry.slower_in_few_rows})" for entry in patched if entry.slower_in_few_rows
        )
        if norms and self.least_bytes is None:
            lines.append(
                f"  {', '.join(norms)}: on the CPU float32 from {LEAST_IN_ROWS:,} elements on; "
                "the originals compute smaller ones faster"
            )
        return "\n".join(lines)


def _outcome(entry: PatchEntry) -> str:
    if entry.reason == PATCHED_ALREADY:
        return PATCHED_ALREADY
    if not entry.patched:
        return f"left alone: {entry.reason}"
    parts = []
    if entry.error is not None:
        parts.append(f"proved, differs by {entry.error:.0e}")
    if entry.first_error is not None:
        parts.append(f"first input {entry.first_error:.0e} (PyTorch {entry.first_torch_error:.0e})")
    elif entry.passed_on:
        parts.append(f"no call served so far: {entry.passed_on} for the original, first {entry.first_passed_on}")
    return "; ".join(parts) or "patched"
