"""The C kernels against their PyTorch references, and their promise: a row's bits depend on that row alone."""

import pytest
import torch

from headrace.kernels import cpu
from headrace.kernels.entry_format import EntryFormat, insert_entries, page_bytes, read_entries
from headrace.kernels.paged import PagedEntries


def wild_values(n: int, width: int) -> torch.Tensor:
    """Many exponents, ties, zeros, negative zero and the largest magnitudes."""
    g = torch.Generator().manual_seed(n * width)
    x = torch.randn(n, width, generator=g) * torch.exp2(torch.randint(-20, 12, (n, width), generator=g).float())
    x[0] = 0.0
    x[1, ::2] = -0.0
    x[2] = torch.randint(-14, 15, (width,), generator=g) * 0.25
    x[3] = 448.0
    return x.bfloat16().float()


def make_view(entry_format: EntryFormat, entries: int, offset: int = 64) -> PagedEntries:
    storage = torch.full((5, page_bytes(entry_format, entries) + offset + 96), 0xFF, dtype=torch.uint8)
    return PagedEntries(storage, offset, entries, entry_format)


@pytest.mark.parametrize("entries", [2, 64])
@pytest.mark.parametrize("entry_format", list(EntryFormat))
def test_entries_have_the_references_bytes(entry_format: EntryFormat, entries: int) -> None:
    """Inserting writes the same bytes as the reference, nothing else, and reading gives the same values."""
    values = wild_values(2 * entries + 5, entry_format.width)[: 2 * entries]
    slots = torch.randperm(5 * entries, generator=torch.Generator().manual_seed(1))[: 2 * entries]
    slots[1] = -1
    ours, reference = make_view(entry_format, entries), make_view(entry_format, entries)
    cpu.insert_entries(ours, slots, values)
    insert_entries(reference, slots, values)
    assert torch.equal(ours.storage, reference.storage)
    read = slots[slots >= 0]
    assert torch.equal(cpu.read_entries(ours, read), read_entries(reference, read))


@pytest.mark.parametrize("entry_format", [EntryFormat.KV_FP8, EntryFormat.INDEX_FP4])
def test_a_second_round_trip_changes_nothing(entry_format: EntryFormat) -> None:
    """Quantised values are fixed points of the format."""
    once = cpu.round_trip(entry_format, wild_values(9, entry_format.width))
    assert torch.equal(cpu.round_trip(entry_format, once), once)


@pytest.mark.parametrize(("n", "k"), [(16, 32), (24, 512), (50, 128), (512, 128)])
def test_a_product_of_many_rows_is_the_products_of_each(n: int, k: int) -> None:
    """Bits of a row do not depend on how many rows stand beside it, and the numbers are right."""
    g = torch.Generator().manual_seed(n + k)
    x, w = torch.randn(37, k, generator=g), torch.randn(n, k, generator=g)
    packed = cpu.pack_weight(w)
    whole = cpu.linear(x, packed, bf16=False)
    torch.testing.assert_close(whole, (x.double() @ w.double().T).float(), rtol=1e-4, atol=1e-4)
    for cut in (1, 7, 8, 9, 36):
        parts = torch.cat([cpu.linear(x[:cut], packed, bf16=False), cpu.linear(x[cut:], packed, bf16=False)])
        assert torch.equal(parts, whole)


def test_the_hadamard_is_its_own_inverse() -> None:
    """Orthonormal and symmetric, up to bf16."""
    x = wild_values(8, 128)[4:].clamp(-4, 4)
    y = x.clone()
    cpu.hadamard_(y)
    reference = y.clone()
    h = torch.ones(1, 1)
    for _ in range(7):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    torch.testing.assert_close(y, (x @ h) / 128**0.5, rtol=2**-7, atol=2**-7)
    cpu.hadamard_(reference)
    torch.testing.assert_close(reference, x, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize("entry_format", list(EntryFormat))
def test_what_is_no_finite_number_is_read_as_none(entry_format: EntryFormat, what: float) -> None:
    """One such value breaks its group at least, in any place, whatever the format's codes can say; the others stay."""
    width = entry_format.width
    values = wild_values(64, width)
    places = (torch.arange(60) * 17 + 3) % width
    values[torch.arange(60), places] = what
    ours, reference = make_view(entry_format, 64), make_view(entry_format, 64)
    cpu.insert_entries(ours, torch.arange(64), values)
    insert_entries(reference, torch.arange(64), values)
    for view, other in ((ours, reference), (reference, ours)):
        for read in (cpu.read_entries, read_entries):
            got = read(view, torch.arange(64))
            assert not got[torch.arange(60), places].isfinite().any()
            assert torch.equal(got[60:], read_entries(other, torch.arange(60, 64)))
            assert got[60:].isfinite().all()


def test_a_broken_key_breaks_the_choice() -> None:
    """However many others there are: a key that cannot be read must not pass for one that nobody wants."""
    g = torch.Generator().manual_seed(6)
    view, pages = make_view(EntryFormat.INDEX_FP4, 64), torch.tensor([[3, 0, 4, 1]], dtype=torch.int32)
    at = pages[0, torch.arange(256) // 64].long() * 64 + torch.arange(256) % 64
    keys = torch.randn(256, 128, generator=g)
    keys[200, 77] = float("nan")
    cpu.insert_entries(view, at, keys)
    q, w = torch.randn(2, 4, 128, generator=g), torch.rand(2, 4, generator=g) - 2
    seq, positions = torch.zeros(2, dtype=torch.int32), torch.tensor([4 * 200 - 1, 4 * 201 - 1])
    chosen = cpu.select_entries(q, w, positions, seq, view, pages, 16)
    assert chosen[1].tolist() == [16, -1]
    window, entries = make_view(EntryFormat.KV_BF16, 64), make_view(EntryFormat.KV_FP8, 64)
    for either in (window, entries):
        cpu.insert_entries(either, torch.arange(320), torch.randn(320, 512, generator=g))
    out = cpu.attend(
        torch.randn(2, 3, 512, generator=g), positions, seq, window, torch.tensor([[0, 1, 2]], dtype=torch.int32),
        torch.tensor([10], dtype=torch.int32), entries, pages, 4, chosen, torch.zeros(3), bf16=True,
    )  # fmt: skip
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


def test_selection_is_the_stable_top_k() -> None:
    """Largest scores win, ties go to the lower entry, the result is ascending."""
    g = torch.Generator().manual_seed(5)
    view = make_view(EntryFormat.INDEX_FP32, 64)
    keys = torch.randint(-2, 3, (200, 128), generator=g).float()
    history = torch.tensor([[3, 0, 4, 1]], dtype=torch.int32)
    slots = history[0, torch.arange(200) // 64].long() * 64 + torch.arange(200) % 64
    cpu.insert_entries(view, slots, keys)
    q = torch.randint(-2, 3, (6, 4, 128), generator=g).float()
    w = torch.randint(-1, 2, (6, 4), generator=g).float()
    positions = torch.tensor([799, 31, 63, 400, 799, -1])
    chosen, count = cpu.select_entries(q, w, positions, torch.zeros(6, dtype=torch.int32), view, history, 16)
    for t, p in enumerate(positions.tolist()):
        n = (p + 1) // 4
        scores = (w[t][:, None] * (q[t] @ keys[:n].T).relu()).sum(0)
        expected = sorted(sorted(range(n), key=lambda j, s=scores: (-s[j].item(), j))[:16])
        assert count[t] == min(16, n)
        assert chosen[t, : count[t]].tolist() == expected
