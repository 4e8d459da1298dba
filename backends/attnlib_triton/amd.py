"""Tiles for AMD, by architecture: found by compiling, never timed. ci/compile_triton.py looks at what they become.

A kernel's registers grow with head_dim, and with what is looked up for each score: problems with a bias, a mask or a
block mask take smaller tiles. Where no tile spills fewer than SPILLS registers, the problem is refused.
"""

from __future__ import annotations

from attnlib.problem import AttentionProblem

from .archs import Arch

Tile = tuple[int, int, int, int]  # block_m, block_n, warps, stages
# kernel: for head_dims up to so many, the tile of a plain problem, and that of one with something to look up
_Table = dict[str, tuple[tuple[int, Tile, Tile], ...]]

_SMALL = (16, 32, 4, 1)
_CDNA_HALF: _Table = {
    "forward": (
        (128, (128, 64, 4, 1), (64, 64, 4, 1)),
        (256, (64, 64, 4, 1), (64, 32, 4, 1)),
    ),
    "query_gradient": ((256, (64, 32, 4, 1), _SMALL),),
    "key_gradient": ((192, (32, 32, 4, 1), _SMALL), (256, _SMALL, _SMALL)),
    "bias_gradient": ((64, (64, 32, 4, 1), (64, 32, 4, 1)), (256, _SMALL, _SMALL)),
}
_CDNA_SINGLE: _Table = {
    "forward": ((128, (64, 32, 4, 1), (64, 32, 4, 1)), (256, _SMALL, _SMALL)),
    "query_gradient": ((64, (64, 32, 4, 1), _SMALL), (256, _SMALL, _SMALL)),
    "key_gradient": ((256, _SMALL, _SMALL),),
    "bias_gradient": ((256, _SMALL, _SMALL),),
}
_WIDE = (16, 32, 8, 1)  # a small tile for wave32
_RDNA3_HALF: _Table = {
    "forward": ((64, (64, 32, 8, 1), (32, 32, 8, 1)), (256, _WIDE, _WIDE)),
    "query_gradient": ((64, (32, 32, 8, 1), _WIDE), (256, _WIDE, _WIDE)),
    "key_gradient": ((256, _WIDE, _WIDE),),
    "bias_gradient": ((256, _WIDE, _WIDE),),
}
_RDNA4_HALF: _Table = {
    "forward": ((128, (64, 32, 8, 1), (32, 32, 8, 1)), (256, (64, 32, 8, 1), _WIDE)),
    "query_gradient": ((256, (32, 32, 8, 1), _WIDE),),
    "key_gradient": ((256, _WIDE, _WIDE),),
    "bias_gradient": ((256, _WIDE, _WIDE),),
}
_RDNA_SINGLE: _Table = {
    "forward": ((128, (32, 32, 8, 1), (32, 32, 8, 1)), (256, _WIDE, _WIDE)),
    "query_gradient": ((128, (32, 32, 8, 1), _WIDE), (256, _WIDE, _WIDE)),
    "key_gradient": ((256, _WIDE, _WIDE),),
    "bias_gradient": ((256, _WIDE, _WIDE),),
}
_TABLES = {
    ("gfx90a", 2): _CDNA_HALF, ("gfx942", 2): _CDNA_HALF, ("gfx950", 2): _CDNA_HALF,
    ("gfx90a", 4): _CDNA_SINGLE, ("gfx942", 4): _CDNA_SINGLE, ("gfx950", 4): _CDNA_SINGLE,
    ("gfx1100", 2): _RDNA3_HALF, ("gfx1201", 2): _RDNA4_HALF,
    ("gfx1100", 4): _RDNA_SINGLE, ("gfx1201", 4): _RDNA_SINGLE,
}  # fmt: skip

SPILLS = 64  # registers of a lane; a kernel that spills as many is not offered

# The largest head_dim, as it is held, of a forward, a backward, a backward with something to look up; 256 if not here
LIMITS = {
    ("gfx1100", 2): (128, 64, 64), ("gfx1201", 2): (256, 128, 128),
    ("gfx90a", 4): (256, 256, 192), ("gfx942", 4): (256, 256, 192),
}  # fmt: skip


def tile(problem: AttentionProblem, arch: Arch, kernel: str, dim: int, rows: int = 128) -> Tile:
    """The tile of a kernel. dim: the larger head_dim as it is held; rows: as many as a tile of queries needs."""
    for most, plain, loaded in _TABLES[arch.name, problem.dtype.itemsize][kernel]:
        if dim <= most:
            m, n, warps, stages = loaded if looks_up(problem) else plain
            return min(m, rows), n, warps if rows >= m else min(warps, 4), stages
    raise ValueError(f"head_dim: needs at most {most}, got {dim}")


def looks_up(problem: AttentionProblem) -> bool:
    """Whether something is read for each score."""
    return problem.bias is not None or problem.mask or problem.block_mask is not None


def limit(problem: AttentionProblem, arch: Arch) -> int:
    """The largest head_dim, as it is held, whose kernels spill fewer than SPILLS registers."""
    forward, plain, loaded = LIMITS.get((arch.name, problem.dtype.itemsize), (256, 256, 256))
    return forward if not problem.grads else loaded if looks_up(problem) else plain
