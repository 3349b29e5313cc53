"""Vessel and bronchial trees: top-down bisection of a cloud of points in the lung.

Each cluster of points hands its centroid's direction to a child node and splits along its longest axis; all clusters
of a level at once. It gives trees that radiate from the hilum and fill the lung, at a hundredth of the cost of
constrained constructive optimisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cascadeseg.synthesis.fields import Beads

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Tree:
    """Segments of a tree: start and end (N, 3), radii at both (N), mm; ``leaves`` (N) ends beyond each segment.

    ``before`` (N, 3) is the unit direction of the segment that each one continues.
    """

    before: Array
    start: Array
    end: Array
    start_radius: Array
    end_radius: Array
    leaves: npt.NDArray[np.int64]


def grow_tree(rng: np.random.Generator, root: Array, cloud: Array, leaf: float, power: float, cap: float) -> Tree:
    """A tree from ``root`` (3,) to every point of ``cloud`` (N, 3); radii follow Murray's law with this power."""
    nodes = root[None].copy()
    group = np.zeros(len(cloud), dtype=np.int64)
    radius = np.array([min(cap, leaf * len(cloud) ** (1 / power))])
    before = _unit(cloud.mean(axis=0, keepdims=True) - nodes)
    parts: list[tuple[Array, Array, Array, Array, Array, npt.NDArray[np.int64]]] = []
    points = cloud
    while len(points):
        count = np.bincount(group, minlength=len(nodes))
        centroid = _group_mean(points, group, count)
        # The first branches lie close together at the hilum.
        early = np.where(count > len(cloud) / 3, 0.45, np.where(count > len(cloud) / 9, 0.75, 1.0))
        step = rng.uniform(0.35, 0.6, (len(nodes), 1)) * early[:, None]
        step[count == 1] = 1.0
        bend = rng.normal(0, 0.09, nodes.shape) * np.linalg.norm(centroid - nodes, axis=1, keepdims=True)
        child = nodes + step * (centroid - nodes) + np.where(count[:, None] > 1, bend * step, 0)
        width = np.minimum(cap, leaf * count ** (1 / power))
        width = np.minimum(width, radius)
        parts.append((before, nodes, child, np.minimum(radius, width * 1.25), width, count))
        high = _upper_half(rng, points, group, centroid, count)
        keep = count[group] > 1
        points, pair = points[keep], (2 * group + high)[keep]
        used, group = np.unique(pair, return_inverse=True)
        before = _unit(child - nodes)[used // 2]
        nodes, radius = child[used // 2], width[used // 2]
    joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Tree(joined[0], joined[1], joined[2], joined[3], joined[4], joined[5].astype(np.int64))


def _unit(vectors: Array) -> Array:
    """(N, 3) of length 1."""
    unit: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    return unit


def _group_mean(points: Array, group: npt.NDArray[np.int64], count: npt.NDArray[np.int64]) -> Array:
    total = np.stack([np.bincount(group, points[:, a], minlength=len(count)) for a in range(3)], axis=1)
    return total / np.maximum(count, 1)[:, None]


def _upper_half(
    rng: np.random.Generator, points: Array, group: npt.NDArray[np.int64], mean: Array, count: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """1 for the points of each group that lie beyond its median along its (jittered) main axis."""
    offset = points - mean[group]
    moments = np.zeros((len(count), 3, 3))
    for a in range(3):
        for b in range(a, 3):
            moments[:, a, b] = moments[:, b, a] = np.bincount(group, offset[:, a] * offset[:, b], minlength=len(count))
    axis = np.linalg.eigh(moments)[1][:, :, 2] + rng.normal(0, 0.35, (len(count), 3))
    along = np.einsum("na,na->n", offset, axis[group])
    order = np.lexsort((along, group))
    first = np.concatenate([[0], np.cumsum(count)[:-1]])
    rank = np.empty(len(points), dtype=np.int64)
    rank[order] = np.arange(len(points)) - first[group[order]]
    return (rank >= (count[group] + 1) // 2).astype(np.int64)


def tree_beads(tree: Tree) -> Beads:
    """The segments as beads, 0.7 radii (at least 0.45 mm) apart."""
    centres, radii, _ = _beads(tree)
    return Beads(torch.from_numpy(centres).float(), torch.from_numpy(radii).float())


def beads_beside(tree: Tree, least_leaves: int, scale: float, towards: Array, apart: tuple[float, float]) -> Beads:
    """Beads of tubes beside the segments that have at least so many leaves, on the side of ``towards`` (3,).

    They are ``scale`` times as wide as the segments; the axes are ``apart`` apart: so many of the segments' radii, and
    mm.
    """
    centres, radii, along = _beads(tree, least_leaves, scale)
    across = _unit(towards - along * (along @ towards)[:, None])
    centres = centres + across * (apart[0] * radii / scale + apart[1])[:, None]
    return Beads(torch.from_numpy(centres).float(), torch.from_numpy(radii).float())


def _beads(tree: Tree, least_leaves: int = 0, scale: float = 1.0) -> tuple[Array, Array, Array]:
    """Centres (N, 3), radii (N) and unit directions (N, 3), which turn steadily from segment to segment."""
    use = tree.leaves >= least_leaves
    start, end = tree.start[use], tree.end[use]
    r0, r1 = tree.start_radius[use] * scale, tree.end_radius[use] * scale
    length = np.linalg.norm(end - start, axis=1)
    count = np.maximum(2, np.ceil(length / np.maximum(0.45, 0.7 * np.minimum(r0, r1))).astype(np.int64) + 1)
    segment = np.repeat(np.arange(len(count)), count)
    first = np.concatenate([[0], np.cumsum(count)[:-1]])
    u = (np.arange(len(segment)) - first[segment]) / (count[segment] - 1)
    centres = start[segment] + u[:, None] * (end - start)[segment]
    radii = r0[segment] + u * (r1 - r0)[segment]
    before, own = tree.before[use][segment], _unit(end - start)[segment]
    return centres, radii, _unit(before + u[:, None] * (own - before))
