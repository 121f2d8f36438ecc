"""Where the boxes of a graph go: layers from top to bottom, few crossings, straight lines.

The usual way in four steps: turn edges that would close a circle, put each box one layer below
the last that leads to it, order the layers by barycentres, and give each box the place that is
nearest to its neighbours. Small, since a workflow has tens of boxes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Pair = tuple[str, str]
#: A box, or a place where a long edge passes a layer.
Place = Hashable

GAP_X, GAP_Y = 28.0, 54.0
#: A long edge takes so much room in the layers that it passes.
PASSING = 14.0
SWEEPS = 12
#: Boxes that nothing leads to or from, in one row.
LOOSE_IN_A_ROW = 4


@dataclass
class Layout:
    """The middle of each box, and the points that each edge goes through, as it points."""

    width: float
    height: float
    boxes: dict[str, tuple[float, float]]
    lines: dict[Pair, list[tuple[float, float]]]
    #: Edges that point upwards.
    turned: set[Pair]


def lay_out(sizes: Mapping[str, tuple[float, float]], edges: Sequence[Pair]) -> Layout:
    """Place boxes of these sizes, given in the order in which they should be read."""
    wanted = [pair for pair in dict.fromkeys(edges) if pair[0] != pair[1]]
    turned = back_edges(list(sizes), wanted)
    forward = list(dict.fromkeys((pair[1], pair[0]) if pair in turned else pair for pair in wanted))
    joined = {end for pair in forward for end in pair}
    layers = layers_of([key for key in sizes if key in joined], forward)
    rows, chains = with_passages(layers, forward)
    rows = ordered(rows, chains)
    loose = [key for key in sizes if key not in joined]
    widths = {place: PASSING for row in rows for place in row} | {
        key: size[0] for key, size in sizes.items()
    }
    xs = abscissae(rows, links_of(chains), widths)
    for start in range(0, len(loose), LOOSE_IN_A_ROW):
        rows.append(list(loose[start : start + LOOSE_IN_A_ROW]))
        xs |= side_by_side(rows[-1], widths, xs)
    return placed(rows, xs, sizes, widths, chains, wanted, turned)


def back_edges(keys: Sequence[str], edges: Sequence[Pair]) -> set[Pair]:
    """The edges that would close a circle, seen from the first boxes."""
    following = defaultdict(list)
    for source, target in edges:
        following[source].append(target)
    found: set[Pair] = set()
    done: set[str] = set()
    for key in keys:
        path: list[tuple[str, int]] = [] if key in done else [(key, 0)]
        on_path = {key}
        while path:
            node, place = path[-1]
            if place == len(following[node]):
                path.pop()
                on_path.discard(node)
                done.add(node)
                continue
            path[-1] = node, place + 1
            target = following[node][place]
            if target in on_path:
                found.add((node, target))
            elif target not in done:
                path.append((target, 0))
                on_path.add(target)
    return found


def layers_of(keys: Sequence[str], edges: Sequence[Pair]) -> dict[str, int]:
    """One layer below the last that leads to it; a start right above the first that it leads to."""
    before, after = defaultdict(list), defaultdict(list)
    for source, target in edges:
        before[target].append(source)
        after[source].append(target)
    layers: dict[str, int] = {}
    ready = [key for key in keys if not before[key]]
    missing = {key: len(before[key]) for key in keys}
    while ready:
        key = ready.pop(0)
        layers[key] = max((layers[source] + 1 for source in before[key]), default=0)
        for target in after[key]:
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    for key in keys:
        if not before[key]:
            layers[key] = min(layers[target] for target in after[key]) - 1
    return layers


def with_passages(
    layers: Mapping[str, int], edges: Sequence[Pair]
) -> tuple[list[list[Place]], dict[Pair, list[Place]]]:
    """The rows, with a passage wherever an edge passes one, and the places of each edge."""
    rows: list[list[Place]] = [[] for _ in range(max(layers.values(), default=-1) + 1)]
    for key, layer in layers.items():
        rows[layer].append(key)
    chains: dict[Pair, list[Place]] = {}
    for source, target in edges:
        passages: list[Place] = [
            (source, target, layer) for layer in range(layers[source] + 1, layers[target])
        ]
        for layer, passage in enumerate(passages, layers[source] + 1):
            rows[layer].append(passage)
        chains[source, target] = [source, *passages, target]
    return rows, chains


def links_of(chains: Mapping[Pair, Sequence[Place]]) -> tuple[dict[Place, list[Place]], ...]:
    """The neighbours of each place above it, and below it."""
    above: dict[Place, list[Place]] = defaultdict(list)
    below: dict[Place, list[Place]] = defaultdict(list)
    for chain in chains.values():
        for upper, lower in pairwise(chain):
            above[lower].append(upper)
            below[upper].append(lower)
    return above, below


def ordered(rows: list[list[Place]], chains: Mapping[Pair, Sequence[Place]]) -> list[list[Place]]:
    """The rows in the order with the fewest crossings of some that were tried."""
    above, below = links_of(chains)
    best, fewest = [list(row) for row in rows], crossings(rows, below)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for i in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            sort_by(rows[i], rows[i - 1] if down else rows[i + 1], above if down else below)
        if (count := crossings(rows, below)) < fewest:
            best, fewest = [list(row) for row in rows], count
    return best


def sort_by(
    row: list[Place], fixed: Sequence[Place], links: Mapping[Place, Sequence[Place]]
) -> None:
    """Order a row by the barycentres of its neighbours in the row that stays as it is."""
    at = {place: float(x) for x, place in enumerate(fixed)}
    own = {place: float(x) for x, place in enumerate(row)}
    wishes = {p: _mean([at[q] for q in links.get(p, ())], own[p]) for p in row}
    row.sort(key=wishes.__getitem__)


def crossings(rows: Sequence[Sequence[Place]], below: Mapping[Place, Sequence[Place]]) -> int:
    """How often edges cross."""
    count = 0
    for upper, lower in pairwise(rows):
        at = {place: x for x, place in enumerate(lower)}
        ends: list[int] = []
        for place in upper:
            new = sorted(at[other] for other in below.get(place, ()))
            count += sum(end > one for one in new for end in ends)
            ends += new
    return count


def abscissae(
    rows: Sequence[Sequence[Place]],
    links: Sequence[Mapping[Place, Sequence[Place]]],
    widths: Mapping[Place, float],
) -> dict[Place, float]:
    """The middle of each place: near its neighbours, in the order of its row, and apart."""
    xs: dict[Place, float] = {}
    for row in rows:
        xs |= side_by_side(row, widths, {})
    above, below = links
    for sweep in range(SWEEPS * 2):
        down = sweep % 2 == 0
        neighbours = above if down else below
        for row in rows if down else reversed(rows):
            wishes = [_mean([xs[other] for other in neighbours.get(p, ())], xs[p]) for p in row]
            xs |= zip(row, apart(row, wishes, widths), strict=True)
    for row in rows:  # the last word: between above and below
        both = [[xs[o] for o in (*above.get(p, ()), *below.get(p, ()))] for p in row]
        wishes = [_mean(near, xs[p]) for near, p in zip(both, row, strict=True)]
        xs |= zip(row, apart(row, wishes, widths), strict=True)
    return xs


def apart(
    row: Sequence[Place], wishes: Sequence[float], widths: Mapping[Place, float]
) -> list[float]:
    """The places nearest to the wished ones that keep order and distance: pooled violators."""
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(offsets[-1] + (widths[left] + widths[right]) / 2 + GAP_X)
    pools: list[tuple[float, int]] = []  # the sum of their wishes, and how many
    for wish, offset in zip(wishes, offsets, strict=True):
        total, count = wish - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    starts = [total / count for total, count in pools for _ in range(count)]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]


def side_by_side(
    row: Sequence[Place], widths: Mapping[Place, float], among: Mapping[Place, float]
) -> dict[Place, float]:
    """A row as close as it may be, its middle below the middle of the others."""
    middle = _mean([min(among.values()), max(among.values())], 0.0) if among else 0.0
    places = apart(row, [0.0] * len(row), widths)
    shift = middle - _mean([places[0], places[-1]], 0.0)
    return {place: x + shift for place, x in zip(row, places, strict=True)}


def placed(
    rows: Sequence[Sequence[Place]],
    xs: Mapping[Place, float],
    sizes: Mapping[str, tuple[float, float]],
    widths: Mapping[Place, float],
    chains: Mapping[Pair, Sequence[Place]],
    wanted: Sequence[Pair],
    turned: set[Pair],
) -> Layout:
    """The rows below each other, everything at or right of zero."""
    left = min((xs[p] - widths[p] / 2 for p in xs), default=0.0)
    right = max((xs[p] + widths[p] / 2 for p in xs), default=0.0)
    points: dict[Place, tuple[float, float]] = {}
    tops: dict[Place, tuple[float, float]] = {}
    y = 0.0
    for row in rows:
        height = max((sizes[p][1] for p in row if isinstance(p, str)), default=0.0)
        for place in row:
            points[place] = xs[place] - left, y + height / 2
            own = sizes[place][1] if isinstance(place, str) else height
            tops[place] = y + (height - own) / 2, y + (height + own) / 2
        y += height + GAP_Y
    lines = {}
    for pair in wanted:
        upper, lower = (pair[1], pair[0]) if pair in turned else pair
        line = [(points[upper][0], tops[upper][1])]
        for passage in chains[upper, lower][1:-1]:
            line += [(points[passage][0], edge) for edge in tops[passage]]
        line.append((points[lower][0], tops[lower][0]))
        lines[pair] = line[::-1] if pair in turned else line
    boxes = {key: points[key] for key in sizes}
    return Layout(right - left, max(y - GAP_Y, 0.0), boxes, lines, turned)


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
