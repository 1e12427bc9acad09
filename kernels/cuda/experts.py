"""K8 and the experts [BI]: gate, routing, the two grouped products and their sum, in Triton.

    score = sqrt(softplus(x . gate))     chosen: the best score + bias, ties to the lower expert, or a table's row
    y     = sum over choices of weight * expert(x), + shared(x)
    expert(x) = w2 (silu(min(w1 x, limit)) * clamp(w3 x, limit))

The shared expert is the last of the stacks and has every token. Rows are grouped by expert, tiles of BLOCK_M rows are
listed with the expert that they belong to; a choice's row lies where the choices before it in the step put it, and no
bit depends on that.

Shape letters: T tokens, E routed experts, C choices, F expert width, D hidden, A = T * (C + 1) rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .dense import Tile


@dataclass(frozen=True)
class Routing:
    """Where the rows of a step went; all int32."""

    row_of_A: Tensor
    """The token of each row."""
    place_TC: Tensor
    """[T, C + 1]: the row of each choice, the shared expert's last."""
    tile_expert: Tensor
    """-1: the tile is not used."""
    tile_first: Tensor
    tile_end: Tensor
    """First row of a tile, and one past the last of its expert."""
    block_m: int


def max_tiles(tokens: int, choices: int, experts: int, block_m: int) -> int:
    """No routing makes more tiles."""
    rows = tokens * choices
    return min(rows, experts) + rows // block_m + -(-tokens // block_m)


def gate(
    logits: Tensor, bias_E: Tensor | None, table_VC: Tensor | None, token_ids_T: Tensor, choices: int, scaling: float,
    *, normalise: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Experts int32 [T, C] and their weights fp32 [T, C].

    Args:
        logits: fp32 [T, E], or [parts, T, E] whose parts are summed in order. bias_E: fp32; table_VC: int32; one of
            the two is None.
    """
    from . import triton_source

    split = logits.shape[0] if logits.dim() == 3 else 1
    t, e = logits.shape[-2:]
    ids = torch.empty(t, choices, dtype=torch.int32, device=logits.device)
    weights = torch.empty(t, choices, dtype=torch.float32, device=logits.device)
    hashed = table_VC is not None
    triton_source.gate[(t,)](
        logits, ids if bias_E is None else bias_E, ids if table_VC is None else table_VC, token_ids_T, ids, weights,
        t, e, scaling, SPLIT=split, CHOICES=choices, HASHED=hashed, NORMALISE=normalise, BLOCK=max(16, power_of_two(e)),
        num_warps=1,
    )  # fmt: skip
    return ids, weights


def route(ids_TC: Tensor, experts: int, block_m: int) -> Routing:
    """Groups the step's rows by expert."""
    from . import triton_source

    t, c = ids_TC.shape

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids_TC.device)

    tiles = max_tiles(t, c, experts, block_m)
    chunk, warps = (512, 4) if t * c <= 4096 else (4096, 8)  # choices that a program looks at together
    found = Routing(empty(t * (c + 1)), empty(t, c + 1), empty(tiles), empty(tiles), empty(tiles), block_m)
    triton_source.route[(experts + 1,)](
        ids_TC, found.row_of_A, found.place_TC, found.tile_expert, found.tile_first, found.tile_end, t, experts, tiles,
        CHOICES=c, BLOCK_M=block_m, BINS=power_of_two(experts + 2), CHUNK=chunk, num_warps=warps,
    )  # fmt: skip
    return found


MANY_ROWS = Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 3)
"""Up, down; both cut the rows alike."""


def tiles_of(tokens: int, depth: int) -> tuple[Tile, Tile]:
    """Of the product up and the one down; no bit depends on them."""
    if depth < 64:
        return Tile(64, 32, 32, 4, 3), Tile(64, 32, 32, 4, 3)
    if tokens <= 2048:
        return Tile(64, 64, 64, 4, 4), Tile(64, 64, 64, 4, 5)
    return MANY_ROWS


def experts(
    x_TD: Tensor, ids_TC: Tensor, weights_TC: Tensor, w13: Tensor, w2: Tensor, limit: float, out: torch.dtype
) -> Tensor:
    """Chosen experts and the shared one -> [T, D] of `out`. x_TD, w13 [E + 1, 2F, D], w2 [E + 1, D, F]: contiguous."""
    from . import triton_source

    t, d = x_TD.shape
    c, e, f = ids_TC.shape[1], w13.shape[0] - 1, w2.shape[2]
    assert x_TD.is_contiguous()
    assert w13.is_contiguous()
    assert w2.is_contiguous()
    up, down = tiles_of(t, min(d, f))
    routing = route(ids_TC, e, up.m)
    tiles = routing.tile_expert.shape[0]
    lists = routing.tile_expert, routing.tile_first, routing.tile_end
    h = torch.empty(t * (c + 1), f, dtype=x_TD.dtype, device=x_TD.device)
    triton_source.expert_up[(-(-f // up.n), tiles)](
        x_TD, w13, h, routing.row_of_A, *lists, d, f, limit,
        BLOCK_M=up.m, BLOCK_N=up.n, BLOCK_K=up.k, EVEN_K=d % up.k == 0, num_warps=up.warps, num_stages=up.stages,
    )  # fmt: skip
    rows = torch.empty(t * (c + 1), d, dtype=torch.float32, device=x_TD.device)
    triton_source.expert_down[(-(-d // down.n), tiles)](
        h, w2, rows, *lists, f, d,
        BLOCK_M=down.m, BLOCK_N=down.n, BLOCK_K=down.k, EVEN_K=f % down.k == 0,
        num_warps=down.warps, num_stages=down.stages,
    )  # fmt: skip
    y = torch.empty(t, d, dtype=out, device=x_TD.device)
    block = min(1024, power_of_two(d))
    triton_source.expert_sum[(t, -(-d // block))](
        rows, routing.place_TC, weights_TC, y, d, CHOICES=c, BLOCK=block, num_warps=4
    )
    return y


def power_of_two(n: int) -> int:
    """The least that is at least n."""
    return 1 << (n - 1).bit_length()
