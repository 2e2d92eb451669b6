"""The error path as text, and which node learned which domain: as rows, as text, as an image."""

import math

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import Circle, Wedge

from ..common import report as _  # noqa: F401  chooses matplotlib's backend

SHOWN = 12  # rows of the table
COLOURS = ("#1b9e77", "#e6ab02", "#3b6fb6", "#c2448b", "#7a9a2f", "#8c564b", "#17a2b8", "#666666")
UNUSED = "#c8c8c8"


def path_lines(tree, found):
    """The path of an Attribution with the siblings of its nodes: gradient norm of each branch, scale of each update."""
    on_path, norms, scales = found.path.tolist(), found.norms.tolist(), found.scales.tolist()
    lines = []

    def add(node, before, stem, below):
        text = f"  {before + stem + str(node.node_id):16} gradient {norms[node.number]:9.4f}"
        if node.number in on_path:
            text += f"  update x{scales[node.number]:.2f}" + ("  <- responsible" if node.is_leaf else "")
        lines.append(text)
        if node.number in on_path:
            for child in node.child_nodes:
                last = child is node.child_nodes[-1]
                add(child, before + below, "└─ " if last else "├─ ", "   " if last else "│  ")

    add(tree.root, "", "", "")
    return lines


# ---- which node learned which domain ----


def shares(counts, drawn):
    """Of each node's times on the path, the share of each domain, as if every domain had been drawn as often.

    counts (domains, nodes), drawn (domains,): batches of each -> (domains, nodes), zeros for nodes never on a path.
    """
    rates = np.asarray(counts, float) / np.maximum(np.asarray(drawn, float), 1)[:, None]
    return rates / np.maximum(rates.sum(0), 1e-12)


def node_rows(tree, counts, domains, costs):
    """A dict per node: its id, level, times on the path, main domain and share, what leaving it out costs a domain."""
    counts = np.asarray(counts)
    share = shares(counts, counts[:, 0])  # the root is on every path
    found = []
    for node in tree.nodes:
        times = int(counts[:, node.number].sum())
        main = int(share[:, node.number].argmax())
        row = {"node": node.node_id, "level": node.level, "on_path": times}
        row |= {"domain": domains[main] if times else "", "share": float(share[main, node.number])}
        cost = costs.get(node.number, {})
        found.append(row | {f"without_it_{domain}": cost.get(domain, "") for domain in domains})
    return found


def node_lines(rows, domains):
    """The nodes most often held responsible or above one, as lines of a table."""
    lines = [f"{'node':>6}{'on path':>9}  {'domain':16}{'share':>6}   loss without it: " + ", ".join(domains)]
    chosen = sorted((row for row in rows if row["level"] and row["on_path"]), key=lambda row: -row["on_path"])
    for row in chosen[:SHOWN]:
        costs = "".join(f"{row[f'without_it_{domain}']:>+10.4f}" for domain in domains)
        lines.append(f"{row['node']:>6}{row['on_path']:>9}  {row['domain']:16}{row['share']:>6.0%}{costs}")
    unused = sum(not row["on_path"] for row in rows)
    return [*lines, f"{len(rows) - unused} of {len(rows)} nodes were on a path"]


def positions(tree):
    """{number: (x, y, angle)} of a drawing with the root in the middle and a ring per level."""
    leaves, found = in_order(tree.root), {}

    def place(node):
        angles = [place(child) for child in node.child_nodes] or [2 * math.pi * leaves.index(node) / len(leaves)]
        angle = sum(angles) / len(angles)
        found[node.number] = node.level * math.cos(angle), node.level * math.sin(angle), angle
        return angle

    place(tree.root)
    return found


def in_order(node):
    """The leaves below a node, from left to right."""
    return [node] if node.is_leaf else [leaf for child in node.child_nodes for leaf in in_order(child)]


def draw_tree(axes, tree, counts, domains):
    """The tree with a pie per node: its size is how often the node was on the error path, its parts the domains."""
    counts = np.asarray(counts)
    share, times = shares(counts, counts[:, 0]), counts.sum(0)
    where, most = positions(tree), max(1.0, times.max())
    for node in tree.nodes:
        for child in node.child_nodes:
            (x0, y0), (x1, y1) = (where[end.number][:2] for end in (node, child))
            used = times[child.number] / most
            style = {"color": "#404040", "lw": 0.8 + 5 * used} if used else {"color": UNUSED, "lw": 0.8}
            axes.plot((x0, x1), (y0, y1), zorder=1, solid_capstyle="round", **style)
    for node in tree.nodes:
        x, y, angle = where[node.number]
        radius = 0.07 + 0.17 * math.sqrt(times[node.number] / most)
        if times[node.number]:
            begin = 90.0
            for number, part in enumerate(share[:, node.number]):
                end = begin + 360 * part
                colour = COLOURS[number % len(COLOURS)]
                axes.add_patch(Wedge((x, y), radius, begin, end, fc=colour, ec="white", lw=0.5, zorder=2))
                begin = end
        else:
            axes.add_patch(Circle((x, y), radius, fc="white", ec=UNUSED, zorder=2))
        away = radius + 0.12
        label = x + away * math.cos(angle), y + away * math.sin(angle) if node.level else y - away
        colour = "#202020" if times[node.number] else "#a0a0a0"
        axes.text(*label, str(node.node_id), ha="center", va="center", fontsize=8, color=colour, zorder=3)
    reach = len(tree.levels) - 1 + 0.45
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    axes.axis("off")
    handles = [Circle((0, 0), 1, fc=COLOURS[number % len(COLOURS)], label=name) for number, name in enumerate(domains)]
    axes.legend(handles=handles, loc="upper left", frameon=False, title="batches of")


def write_tree(path, tree, counts, domains):
    """The drawing as a PNG file."""
    figure, axes = plt.subplots(figsize=(8, 8), constrained_layout=True)
    axes.set_title("which node the error paths of which domain led through")
    draw_tree(axes, tree, counts, domains)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def draw_costs(axes, rows, domains, shown=14):
    """How much the held-out loss of each domain rises without a node, for the nodes that matter most."""
    valued = [row for row in rows if row[f"without_it_{domains[0]}"] != ""]
    chosen = sorted(valued, key=lambda row: -max(row[f"without_it_{domain}"] for domain in domains))[:shown]
    width = 0.8 / len(domains)
    for number, domain in enumerate(domains):
        heights = [row[f"without_it_{domain}"] for row in chosen]
        places = np.arange(len(chosen)) + (number - (len(domains) - 1) / 2) * width
        axes.bar(places, heights, width, color=COLOURS[number % len(COLOURS)], label=domain)
    axes.set_xticks(range(len(chosen)), [str(row["node"]) for row in chosen])
    axes.axhline(0, color="#404040", lw=0.8)
    axes.set(xlabel="node", ylabel="rise of held-out loss", title="what leaving a node out costs each domain")
    axes.legend()
