"""The Triton kernels of a V4 step; launched by the modules beside it, which say what each promises.

The only module here that imports triton at its top: whoever launches a kernel imports it inside a function. A program
works on rows that nobody else works on, in an order that its constants fix: no result depends on the batch.
"""

# mypy: ignore-errors
# ruff: noqa: E501, SIM102

import triton
import triton.language as tl


@triton.jit
def _round(x):
    """The nearest bf16, ties to even, as fp32; in integers, since the interpreter's own conversion cuts."""
    bits = x.to(tl.int32, bitcast=True)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(x == x, near, x)  # a NaN's bits may round to a zero's


# ---- products ----


# What changes from step to step is not to be specialised for: each new kind of number would be compiled anew.
@triton.jit(do_not_specialize=["num_rows", "y_split"])
def linear(
    x, w, y, num_rows, num_columns, depth, x_row, x_batch, w_batch, y_row, y_batch, y_split,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    batch, split = tl.program_id(1) // SPLIT, tl.program_id(1) % SPLIT
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    # Programs that run at once share rows and columns, so that both stay in the cache.
    width = GROUP_M * tiles_n
    group = pid // width
    size = min(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + (pid % width) % size
    tile_n = (pid % width) // size
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    has_m, has_n = m < num_rows, n < num_columns
    steps = tl.cdiv(tl.cdiv(depth, BLOCK_K), SPLIT)
    begin = split * steps * BLOCK_K
    a_at = x + batch.to(tl.int64) * x_batch + m.to(tl.int64)[:, None] * x_row + (begin + k)[None, :]
    b_at = w + batch.to(tl.int64) * w_batch + n.to(tl.int64)[None, :] * depth + (begin + k)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(steps):
        if EVEN_K:
            a = tl.load(a_at, mask=has_m[:, None], other=0.0)
            b = tl.load(b_at, mask=has_n[None, :], other=0.0)
        else:
            has_k = begin + step * BLOCK_K + k < depth
            a = tl.load(a_at, mask=has_m[:, None] & has_k[None, :], other=0.0)
            b = tl.load(b_at, mask=has_n[None, :] & has_k[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
        a_at += BLOCK_K
        b_at += BLOCK_K
    to = y + split.to(tl.int64) * y_split + batch.to(tl.int64) * y_batch + m.to(tl.int64)[:, None] * y_row + n[None, :]
    tl.store(to, acc.to(y.dtype.element_ty), mask=has_m[:, None] & has_n[None, :])


@triton.jit
def _up_rows(
    x, w, h, row_of, expert, first, end, depth, width, limit,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    rows = first + tl.arange(0, ROWS)
    has_m = rows < end
    tokens = tl.load(row_of + rows, mask=has_m, other=0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    has_n = n < width
    a_at = x + tokens.to(tl.int64)[:, None] * depth + k[None, :]
    b_at = w + (expert.to(tl.int64) * 2 * width + n)[None, :] * depth + k[:, None]
    second = width.to(tl.int64) * depth
    left = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    right = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(depth, BLOCK_K)):
        if EVEN_K:
            a = tl.load(a_at, mask=has_m[:, None], other=0.0)
            b = tl.load(b_at, mask=has_n[None, :], other=0.0)
            c = tl.load(b_at + second, mask=has_n[None, :], other=0.0)
        else:
            has_k = step * BLOCK_K + k < depth
            a = tl.load(a_at, mask=has_m[:, None] & has_k[None, :], other=0.0)
            b = tl.load(b_at, mask=has_n[None, :] & has_k[:, None], other=0.0)
            c = tl.load(b_at + second, mask=has_n[None, :] & has_k[:, None], other=0.0)
        left = tl.dot(a, b, left)
        right = tl.dot(a, c, right)
        a_at += BLOCK_K
        b_at += BLOCK_K
    # Not by minimum and maximum, which lose a NaN.
    left = tl.where(left > limit, limit, left)
    right = tl.where(right > limit, limit, tl.where(right < -limit, -limit, right))
    out = left / (1.0 + tl.exp(-left)) * right
    to = h + rows.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(to, out.to(h.dtype.element_ty), mask=has_m[:, None] & has_n[None, :])


@triton.jit
def expert_up(
    x, w, h, row_of, tile_expert, tile_first, tile_end, depth, width, limit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    first, end = tl.load(tile_first + tile), tl.load(tile_end + tile)
    # An expert's last tile is half empty in the mean: half a tile costs half the time.
    if (BLOCK_M > 64) and (end - first <= BLOCK_M // 2):
        _up_rows(x, w, h, row_of, expert, first, end, depth, width, limit, BLOCK_M // 2, BLOCK_N, BLOCK_K, EVEN_K)
    else:
        _up_rows(x, w, h, row_of, expert, first, end, depth, width, limit, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)


@triton.jit
def _down_rows(
    h, w, out, expert, first, end, depth, width,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    rows = first + tl.arange(0, ROWS)
    has_m = rows < end
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    has_n = n < width
    a_at = h + rows.to(tl.int64)[:, None] * depth + k[None, :]
    b_at = w + (expert.to(tl.int64) * width + n)[None, :] * depth + k[:, None]
    acc = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(depth, BLOCK_K)):
        if EVEN_K:
            a = tl.load(a_at, mask=has_m[:, None], other=0.0)
            b = tl.load(b_at, mask=has_n[None, :], other=0.0)
        else:
            has_k = step * BLOCK_K + k < depth
            a = tl.load(a_at, mask=has_m[:, None] & has_k[None, :], other=0.0)
            b = tl.load(b_at, mask=has_n[None, :] & has_k[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
        a_at += BLOCK_K
        b_at += BLOCK_K
    to = out + rows.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(to, acc, mask=has_m[:, None] & has_n[None, :])


@triton.jit
def expert_down(
    h, w, out, tile_expert, tile_first, tile_end, depth, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    first, end = tl.load(tile_first + tile), tl.load(tile_end + tile)
    if (BLOCK_M > 64) and (end - first <= BLOCK_M // 2):
        _down_rows(h, w, out, expert, first, end, depth, width, BLOCK_M // 2, BLOCK_N, BLOCK_K, EVEN_K)
    else:
        _down_rows(h, w, out, expert, first, end, depth, width, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)


@triton.jit
def expert_sum(out, place, weights, y, width, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    has = n < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for c in tl.static_range(CHOICES):
        row = tl.load(place + token * (CHOICES + 1) + c).to(tl.int64)
        weight = tl.load(weights + token * CHOICES + c)
        total += weight * tl.load(out + row * width + n, mask=has, other=0.0)
    row = tl.load(place + token * (CHOICES + 1) + CHOICES).to(tl.int64)
    total += tl.load(out + row * width + n, mask=has, other=0.0)
    tl.store(y + token.to(tl.int64) * width + n, total.to(y.dtype.element_ty), mask=has)


# ---- gate and routing ----


@triton.jit(do_not_specialize=["num_rows"])
def gate(
    logits, bias, table, token_ids, ids, weights, num_rows, num_experts, scaling,
    SPLIT: tl.constexpr, CHOICES: tl.constexpr, HASHED: tl.constexpr, NORMALISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    has = e < num_experts
    x = tl.zeros((BLOCK,), dtype=tl.float32)
    for s in tl.static_range(SPLIT):
        x += tl.load(logits + (s * num_rows + token).to(tl.int64) * num_experts + e, mask=has, other=0.0)
    small = tl.exp(tl.minimum(x, 20.0))
    # log(1 + small), which loses what is small, so by its series there.
    soft = tl.where(small < 0.01, small * (1.0 - small * (0.5 - small * (1.0 / 3 - small * 0.25))), tl.log(1.0 + small))
    score = tl.sqrt(tl.where(x > 20.0, x, soft))
    broken = tl.max((has & (x != x)).to(tl.int32), 0)  # a NaN would be no expert's largest score
    if HASHED:
        token_id = tl.load(token_ids + token)
    else:
        value = tl.where(has, score + tl.load(bias + e, mask=has, other=0.0), -float("inf"))
    c_at = tl.arange(0, 16)
    chosen = tl.zeros((16,), dtype=tl.int32)
    chosen_weight = tl.zeros((16,), dtype=tl.float32)
    total = 0.0
    for c in tl.static_range(CHOICES):
        if HASHED:
            best = tl.load(table + token_id * CHOICES + c).to(tl.int32)
        else:
            top = tl.max(value, 0)
            best = tl.minimum(tl.min(tl.where(value == top, e, BLOCK), 0), num_experts - 1)
            value = tl.where(e == best, -float("inf"), value)
        weight = tl.sum(tl.where(e == best, score, 0.0), 0)
        chosen = tl.where(c_at == c, best, chosen)
        chosen_weight = tl.where(c_at == c, weight, chosen_weight)
        total += weight
    if NORMALISE:
        chosen_weight = chosen_weight / (total + 1e-20)
    tl.store(ids + token * CHOICES + c_at, chosen, mask=c_at < CHOICES)
    chosen_weight = tl.where(broken > 0, float("nan"), chosen_weight * scaling)
    tl.store(weights + token * CHOICES + c_at, chosen_weight, mask=c_at < CHOICES)


@triton.jit(do_not_specialize=["num_tokens", "max_tiles"])
def route(
    ids, row_of, place, tile_expert, tile_first, tile_end, num_tokens, num_experts, max_tiles,
    CHOICES: tl.constexpr, BLOCK_M: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    number = num_tokens * CHOICES
    bins, at = tl.arange(0, BINS), tl.arange(0, CHUNK)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, number, CHUNK):
        i = start + at
        counts += tl.histogram(tl.load(ids + i, mask=i < number, other=BINS - 1), BINS)
    # The shared expert comes last and has every token; a bin past it holds what was masked.
    counts = tl.where(bins == num_experts, num_tokens, tl.where(bins < num_experts, counts, 0))
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    num_tiles = tl.sum(tl.where(bins == expert, tiles, 0), 0)
    if expert == num_experts:
        for start in range(0, num_tokens, CHUNK):
            token = start + at
            tl.store(row_of + first + token, token, mask=token < num_tokens)
            tl.store(place + token * (CHOICES + 1) + CHOICES, first + token, mask=token < num_tokens)
        for start in range(first_tile + num_tiles, max_tiles, CHUNK):
            tl.store(tile_expert + start + at, -1 + tl.zeros((CHUNK,), dtype=tl.int32), mask=start + at < max_tiles)
    else:
        done = first
        for start in range(0, number, CHUNK):
            i = start + at
            mine = (tl.load(ids + i, mask=i < number, other=-1) == expert).to(tl.int32)
            to = done + tl.cumsum(mine, 0) - 1
            tl.store(row_of + to, i // CHOICES, mask=mine == 1)
            tl.store(place + (i // CHOICES) * (CHOICES + 1) + i % CHOICES, to, mask=mine == 1)
            done += tl.sum(mine, 0)
    for start in range(0, num_tiles, CHUNK):
        tile = start + at
        to, is_one = first_tile + tile, tile < num_tiles
        tl.store(tile_expert + to, expert + tl.zeros((CHUNK,), dtype=tl.int32), mask=is_one)
        tl.store(tile_first + to, first + tile * BLOCK_M, mask=is_one)
        tl.store(tile_end + to, first + count + tl.zeros((CHUNK,), dtype=tl.int32), mask=is_one)


# ---- rows ----


@triton.jit
def norm_pair(
    x, x_row, q_weight, kv_weight, qr, kv, rank, eps, ROUND: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, RANK)
    has = i < rank
    a = tl.load(x + token * x_row + i, mask=has, other=0.0)
    if ROUND:
        a = _round(a)
    scale = 1.0 / tl.sqrt(tl.sum(a * a, 0) / rank + eps)
    a = a * scale * tl.load(q_weight + i, mask=has, other=0.0)
    tl.store(qr + token * rank + i, a.to(qr.dtype.element_ty), mask=has)
    j = tl.arange(0, WIDTH)
    b = tl.load(x + token * x_row + rank + j)
    if ROUND:
        b = _round(b)
    scale = 1.0 / tl.sqrt(tl.sum(b * b, 0) / WIDTH + eps)
    tl.store(kv + token * WIDTH + j, (b * scale * tl.load(kv_weight + j)).to(kv.dtype.element_ty))


@triton.jit
def turn_back(o, positions, cos_sin, num_heads, BLOCK_H: tl.constexpr):
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h, i = block * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, 64)
    at = o + (token * num_heads + h)[:, None] * 512 + 448 + i[None, :]
    has = (h < num_heads)[:, None] & (i < 64)[None, :]
    x = tl.load(at, mask=has, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (BLOCK_H, 32, 2)))
    turn = cos_sin + tl.load(positions + token) * 64 + tl.arange(0, 32)
    cos, sin = tl.load(turn)[None, :], tl.load(turn + 32)[None, :]
    y = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (BLOCK_H, 64))
    tl.store(at, y.to(o.dtype.element_ty), mask=has)


@triton.jit
def norm_rope(q, q_row, positions, cos_sin, num_heads, eps, BLOCK_H: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c, i = tl.arange(0, 512), tl.arange(0, 64)
    at = q + token * q_row + h[:, None] * 512
    is_head = (h < num_heads)[:, None]
    x = tl.load(at + c[None, :], mask=is_head & (c < 512)[None, :], other=0.0).to(tl.float32)
    tail = tl.load(at + 448 + i[None, :], mask=is_head & (i < 64)[None, :], other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / 512 + eps)
    even, odd = tl.split(tl.reshape(tail * scale[:, None], (BLOCK_H, 32, 2)))
    turn = cos_sin + tl.load(positions + token) * 64 + tl.arange(0, 32)
    cos, sin = tl.load(turn)[None, :], tl.load(turn + 32)[None, :]
    y = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (BLOCK_H, 64))
    tl.debug_barrier()  # what is read above is written below
    tl.store(at + c[None, :], (x * scale[:, None]).to(q.dtype.element_ty), mask=is_head & (c < 448)[None, :])
    tl.store(at + 448 + i[None, :], y.to(q.dtype.element_ty), mask=is_head & (i < 64)[None, :])


@triton.jit
def likeliest(logits, row_stride, width, found, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    best, best_at, broken = -float("inf"), 0, 0
    for start in range(0, width, BLOCK):
        i = start + at
        x = tl.load(logits + row.to(tl.int64) * row_stride + i, mask=i < width, other=-float("inf"))
        broken += tl.sum((x != x).to(tl.int32), 0)
        top = tl.max(x, 0)
        place = tl.min(tl.where(x == top, i, 2147483647), 0)
        best_at = tl.where(top > best, place, best_at)
        best = tl.maximum(best, top)
    tl.store(found + row, tl.where(broken > 0, -1, best_at))


# ---- streams of any width ----


@triton.jit
def _mixed(streams, y, post, comb, token, width, AFTER: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr):
    n, d = tl.arange(0, 4), tl.arange(0, BLOCK)
    has = (d < width)[None, :] & (n < 4)[:, None]
    base = streams + token * 4 * width
    if not AFTER:
        return tl.load(base + n[:, None] * width + d[None, :], mask=has, other=0.0).to(tl.float32)
    own = tl.load(y + token * width + d, mask=d < width, other=0.0).to(tl.float32)
    mixed = tl.load(post + token * 4 + n)[:, None] * own[None, :]
    for j in tl.static_range(4):
        old = tl.load(base + j * width + d, mask=d < width, other=0.0).to(tl.float32)
        mixed += tl.load(comb + token * 16 + j * 4 + n)[:, None] * old[None, :]
    if ROUND:
        mixed = _round(mixed)
    return mixed


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def streams_any(
    streams, y, post, comb, fn, base, scale, weight, streams_out, layer_in, post_out, comb_out, width, eps, norm_eps,
    rounds, AFTER: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    n, d = tl.arange(0, 4), tl.arange(0, BLOCK)
    has = (d < width)[None, :] & (n < 4)[:, None]
    s = _mixed(streams, y, post, comb, token, width, AFTER, ROUND, BLOCK)
    tl.debug_barrier()  # streams_out may be streams
    if AFTER:
        to = streams_out + token * 4 * width + n[:, None] * width + d[None, :]
        tl.store(to, s.to(streams_out.dtype.element_ty), mask=has)
    norm = 1.0 / tl.sqrt(tl.sum(tl.sum(s * s, 1), 0) / (4 * width) + norm_eps)
    pre = tl.zeros((4,), dtype=tl.float32)
    after = tl.zeros((4,), dtype=tl.float32)
    m = tl.zeros((4, 4), dtype=tl.float32)
    for r in tl.static_range(24):
        f = tl.load(fn + r * 4 * width + n[:, None] * width + d[None, :], mask=has, other=0.0)
        mix = tl.sum(tl.sum(f * s, 1), 0) * norm
        offset = tl.load(base + r)
        if r < 4:
            pre = tl.where(n == r, _sigmoid(mix * tl.load(scale) + offset) + eps, pre)
        elif r < 8:
            after = tl.where(n == r - 4, 2.0 * _sigmoid(mix * tl.load(scale + 1) + offset), after)
        else:
            here = (n == (r - 8) // 4)[:, None] & (n == (r - 8) % 4)[None, :]
            m = tl.where(here, mix * tl.load(scale + 2) + offset, m)
    m = tl.exp(m - tl.max(m, 1)[:, None])
    m = m / tl.sum(m, 1)[:, None] + eps
    m = m / (tl.sum(m, 0)[None, :] + eps)
    for _ in range(1, rounds):
        m = m / (tl.sum(m, 1)[:, None] + eps)
        m = m / (tl.sum(m, 0)[None, :] + eps)
    tl.store(post_out + token * 4 + n, after)
    tl.store(comb_out + token * 16 + n[:, None] * 4 + n[None, :], m)
    x = tl.sum(pre[:, None] * s, 0)
    if ROUND:
        x = _round(x)
    x = x / tl.sqrt(tl.sum(x * x, 0) / width + norm_eps)
    x = x * tl.load(weight + d, mask=d < width, other=0.0).to(tl.float32)
    tl.store(layer_in + token * width + d, x.to(layer_in.dtype.element_ty), mask=d < width)


@triton.jit
def streams_head(
    streams, y, post, comb, rows, fn, base, scale, weight, out, width, eps, norm_eps,
    ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token = tl.load(rows + row)
    n, d = tl.arange(0, 4), tl.arange(0, BLOCK)
    has = (d < width)[None, :] & (n < 4)[:, None]
    s = _mixed(streams, y, post, comb, token, width, True, ROUND, BLOCK)
    norm = 1.0 / tl.sqrt(tl.sum(tl.sum(s * s, 1), 0) / (4 * width) + norm_eps)
    pre = tl.zeros((4,), dtype=tl.float32)
    for r in tl.static_range(4):
        f = tl.load(fn + r * 4 * width + n[:, None] * width + d[None, :], mask=has, other=0.0)
        mix = tl.sum(tl.sum(f * s, 1), 0) * norm
        pre = tl.where(n == r, _sigmoid(mix * tl.load(scale) + tl.load(base + r)) + eps, pre)
    x = tl.sum(pre[:, None] * s, 0)
    if ROUND:
        x = _round(x)
    x = x / tl.sqrt(tl.sum(x * x, 0) / width + norm_eps)
    x = x * tl.load(weight + d, mask=d < width, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * width + d, x.to(out.dtype.element_ty), mask=d < width)


# ---- the indexer's keys and queries ----


@triton.jit
def _hadamard_64():
    v = tl.arange(0, 64)[:, None] & tl.arange(0, 64)[None, :]
    v = v ^ (v >> 4)
    v = v ^ (v >> 2)
    v = v ^ (v >> 1)
    return (1 - 2 * (v & 1)).to(tl.float32)


@triton.jit
def _power(top):
    """ceil(log2(top / 6)) from the bits of top: 6 = 1.5 * 2^2."""
    bits = tl.maximum(top, 7.052966104933725e-38).to(tl.int32, bitcast=True)  # 6 * 2^-126
    return (bits >> 23) - 129 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)


@triton.jit
def _two_to(power):
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _code(x):
    """e2m1 code of a value scaled to 6 at most: to nearest, ties to even, no negative zero."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return tl.where((x < 0.0) & (code > 0), code + 8, code)


@triton.jit
def _value(code):
    """Magnitude of an e2m1 code."""
    c = code & 7
    return tl.where(c < 2, 0.5 * c, (1.0 + 0.5 * (c & 1)) * _two_to((c >> 1) - 1))


@triton.jit
def _e4m3(x):
    """Bits of a magnitude that has two significant bits, or fewer, and is at most 448; what is too small becomes 0."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    normal = (((bits >> 23) - 120) << 3) | ((bits >> 20) & 7)
    return tl.where(x >= 0.015625, normal, (x * 512.0).to(tl.int32))


@triton.jit
def index_keys(
    x, x_row, ape, weight, positions, first_row, last_row, ring, state, ring_stride, ring_rows, slots, pages,
    page_stride, cos_sin, eps, POOL: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    position, own_ring, slot = tl.load(positions + row), tl.load(ring + row), tl.load(slots + row)
    first, last = tl.load(first_row + row), tl.load(last_row + row)
    if own_ring < 0:
        return
    rows_at = state + own_ring * ring_stride
    if SAVE:
        if row > last - 8:
            c = tl.arange(0, 512)
            value = tl.load(x + row.to(tl.int64) * x_row + c)
            value += tl.load(ape + (position % 4) * 256 + c - 256, mask=c >= 256, other=0.0)
            tl.store(rows_at + (position % ring_rows) * 512 + c, value)
    if POOL:
        if (slot >= 0) & ((position + 1) % 4 == 0):
            i = tl.arange(0, 64)
            still = 0 * i  # masks are of blocks: some interpreters take no scalar for one
            first_position = position - (row - first)
            top_e = tl.full((64,), -float("inf"), dtype=tl.float32)
            top_o = tl.full((64,), -float("inf"), dtype=tl.float32)
            for place in tl.static_range(8):
                at = position - 7 + place
                here = at + still >= first_position
                fresh = x + (first + at - first_position).to(tl.int64) * x_row
                column = 128 * (place // 4)
                from_step = fresh + 256 + column + 2 * i
                from_ring = rows_at + (at % ring_rows) * 512 + 256 + column + 2 * i
                bias = ape + (at % 4) * 256 + column + 2 * i
                old = (at + still >= 0) & (at + still < first_position)
                e = tl.where(here, tl.load(from_step, mask=here, other=0.0) + tl.load(bias, mask=here, other=0.0),
                             tl.load(from_ring, mask=old, other=-float("inf")))  # fmt: skip
                o = tl.where(here, tl.load(from_step + 1, mask=here, other=0.0) + tl.load(bias + 1, mask=here, other=0.0),
                             tl.load(from_ring + 1, mask=old, other=-float("inf")))  # fmt: skip
                top_e, top_o = tl.maximum(top_e, e), tl.maximum(top_o, o)
            sum_e, sum_o = tl.zeros((64,), dtype=tl.float32), tl.zeros((64,), dtype=tl.float32)
            even, odd = tl.zeros((64,), dtype=tl.float32), tl.zeros((64,), dtype=tl.float32)
            for place in tl.static_range(8):
                at = position - 7 + place
                here = at + still >= first_position
                fresh = x + (first + at - first_position).to(tl.int64) * x_row
                column = 128 * (place // 4)
                from_step = fresh + column + 2 * i
                from_ring = rows_at + (at % ring_rows) * 512 + column + 2 * i
                bias = ape + (at % 4) * 256 + column + 2 * i
                old = (at + still >= 0) & (at + still < first_position)
                e = tl.where(here, tl.load(from_step + 256, mask=here, other=0.0) + tl.load(bias, mask=here, other=0.0),
                             tl.load(from_ring + 256, mask=old, other=-float("inf")))  # fmt: skip
                o = tl.where(here, tl.load(from_step + 257, mask=here, other=0.0) + tl.load(bias + 1, mask=here, other=0.0),
                             tl.load(from_ring + 257, mask=old, other=-float("inf")))  # fmt: skip
                value_e = tl.load(from_step, mask=here, other=0.0) + tl.load(from_ring, mask=old, other=0.0)
                value_o = tl.load(from_step + 1, mask=here, other=0.0) + tl.load(from_ring + 1, mask=old, other=0.0)
                p_e, p_o = tl.exp(e - top_e), tl.exp(o - top_o)
                sum_e += p_e
                sum_o += p_o
                even += p_e * value_e
                odd += p_o * value_o
            even, odd = _round(even / sum_e), _round(odd / sum_o)
            scale = 1.0 / tl.sqrt(tl.sum(even * even + odd * odd, 0) / 128 + eps)
            even = _round(even * scale * tl.load(weight + 2 * i))
            odd = _round(odd * scale * tl.load(weight + 2 * i + 1))
            turn = cos_sin + (position - position % 4) * 64 + i - 32
            cos, sin = tl.load(turn, mask=i >= 32, other=1.0), tl.load(turn + 32, mask=i >= 32, other=0.0)
            even, odd = _round(even * cos - odd * sin), _round(odd * cos + even * sin)
            h = _hadamard_64()
            a, b = tl.sum(h * even[None, :], 1), tl.sum(h * odd[None, :], 1)
            even, odd = _round((a + b) * 0.08838834764831845), _round((a - b) * 0.08838834764831845)
            power = _power(tl.max(tl.reshape(tl.maximum(tl.abs(even), tl.abs(odd)), (4, 16)), 1))
            down = tl.reshape(tl.broadcast_to(_two_to(-power)[:, None], (4, 16)), (64,))
            page = pages + (slot // 64) * page_stride
            tl.store(page + (slot % 64) * 64 + i, (_code(even * down) | (_code(odd * down) << 4)).to(tl.uint8))
            # fp4 has no NaN: the scale of a group that holds one says so.
            whole = ((tl.abs(even) + tl.abs(odd)) < float("inf")).to(tl.int32)
            whole = tl.min(tl.reshape(whole, (4, 16)), 1)
            tl.store(
                page + 4096 + (slot % 64) * 4 + tl.arange(0, 4), tl.where(whole > 0, power + 127, 255).to(tl.uint8)
            )


@triton.jit
def index_queries(
    q, q_row, w, w_row, positions, cos_sin, out, out_w, num_heads, factor, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h, c, i = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, 128), tl.arange(0, 64)
    has = (h < num_heads)[:, None] & (c < 128)[None, :]
    x = tl.load(q + token * q_row + h[:, None] * 128 + c[None, :], mask=has, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (HEADS, 64, 2)))
    turn = cos_sin + tl.load(positions + token) * 64 + i - 32
    cos = tl.load(turn, mask=i >= 32, other=1.0)[None, :]
    sin = tl.load(turn + 32, mask=i >= 32, other=0.0)[None, :]
    even, odd = _round(even * cos - odd * sin), _round(odd * cos + even * sin)
    hadamard = _hadamard_64()
    a, b = tl.dot(even, hadamard), tl.dot(odd, hadamard)  # in tf32, which holds bf16 exactly
    even, odd = _round((a + b) * 0.08838834764831845), _round((a - b) * 0.08838834764831845)
    power = _power(tl.max(tl.reshape(tl.maximum(tl.abs(even), tl.abs(odd)), (HEADS, 4, 16)), 2))
    most = tl.maximum(tl.max(power, 1), -120)  # of a head of zeros
    whole = tl.min(((tl.abs(even) + tl.abs(odd)) < float("inf")).to(tl.int32), 1)  # fp4 and e4m3 would not tell
    down = tl.reshape(tl.broadcast_to(_two_to(-power)[:, :, None], (HEADS, 4, 16)), (HEADS, 64))
    # A group's codes go out 2^6 times too large, and so much smaller as its scale is smaller than the row's.
    fold = tl.maximum(power - most[:, None], -20) + 6
    up = tl.reshape(tl.broadcast_to(_two_to(fold)[:, :, None], (HEADS, 4, 16)), (HEADS, 64))
    low, high = _code(even * down), _code(odd * down)
    low = _e4m3(_value(low) * up) | ((low >> 3) << 7)
    high = _e4m3(_value(high) * up) | ((high >> 3) << 7)
    both = tl.reshape(tl.join(low, high), (HEADS, 128)).to(tl.uint8)
    tl.store(out + token * 8192 + h[:, None] * 128 + c[None, :], both)
    weight = tl.load(w + token * w_row + h, mask=h < num_heads, other=0.0) * factor
    tl.store(out_w + token * 64 + h, tl.where(whole > 0, weight * _two_to(most - 6), float("nan")))
