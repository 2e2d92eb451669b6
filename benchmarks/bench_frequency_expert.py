"""cx.nn.FrequencyExpert, whole module, beside the stock module."""

from benchmarks.bench_edge_expert import SHAPES, expert_case
from benchmarks.common import Case


def cases() -> list[Case]:
    return [expert_case("FrequencyExpert", shape) for shape in SHAPES]
