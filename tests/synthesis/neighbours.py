"""What lies near what, in masks."""

from torch import Tensor
from torch.nn import functional


def grown(mask: Tensor, reach: int) -> Tensor:
    """(X, Y, Z) whether there is any of a mask in a cube of so many voxels to all sides of each.

    Axis by axis: of cubes at once a width of 25 takes a minute.
    """
    values = mask[None].float()
    for axis in range(3):
        here = [reach * (other == axis) for other in range(3)]
        values = functional.max_pool3d(values, [2 * n + 1 for n in here], 1, here)
    return values[0] > 0


def shrunk(mask: Tensor, reach: int) -> Tensor:
    """(X, Y, Z) whether there is nothing but the mask in such a cube, as far as it is in the volume."""
    return ~grown(~mask, reach)
