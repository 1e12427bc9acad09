"""`headrace layout`: the published figures, from the offset table that pools are built with."""

from __future__ import annotations

import argparse
import json

import pytest

from headrace.cli import layout as command
from headrace.core.errors import ConfigError
from headrace.core.pools import PoolKind
from headrace.kvcache.layout import PRECISIONS, CacheLayout, CacheShape
from headrace.kvcache.pools import CachePools
from headrace.kvcache.presets import PRESETS
from headrace.kvcache.segments import CacheGeometry
from headrace.kvcache.table import cache_table

FLASH, PRO = "deepseek-v4-flash", "deepseek-v4-pro"
MILLION = 1 << 20


def table_of(model: str, tokens: int = MILLION, gib: float | None = None) -> dict:
    return cache_table(PRESETS[model], tokens, gib)


def output_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "precision", "gib"),
    [
        (PRO, "bf16", 9.6246),
        (PRO, "fp8", 4.918),
        (PRO, "fp8+fp8", 5.386),
        (FLASH, "bf16", 6.724),
        (FLASH, "fp8", 3.435),
        (FLASH, "fp8+fp8", 3.763),
    ],
)
def test_a_million_tokens_cost_what_was_published(model, precision, gib):
    """Window once, no compressor rows, no padding, no draft layer."""
    assert table_of(model)["precisions"][precision]["total_gib"] == pytest.approx(gib, abs=6e-4)


def test_the_stack_before_it_costs_what_was_published():
    """83.875 GiB, 8.71 times V4-Pro in bf16."""
    table = table_of(PRO)
    assert table["v3.2_bf16"]["total_gib"] == 83.875
    assert table["v3.2_bf16"]["total_gib"] / table["precisions"]["bf16"]["total_gib"] == pytest.approx(8.71, abs=0.006)


@pytest.mark.parametrize(
    ("model", "precision", "gib"),
    [(PRO, "fp8+fp8", 5.478), (PRO, "fp8", 5.016), (FLASH, "fp8+fp8", 3.823), (FLASH, "fp8", 3.500)],
)
def test_padded_pages_cost_what_was_published(model, precision, gib):
    """Whole history pages."""
    assert table_of(model)["precisions"][precision]["history_pages_gib"] == pytest.approx(gib, abs=6e-4)


@pytest.mark.parametrize(
    ("model", "precision", "mib"),
    [
        (FLASH, "bf16", (32.8, 220.9, 865.9, 6885.9)),
        (FLASH, "fp8+fp8", (18.6, 123.9, 484.8, 3853.8)),
        (FLASH, "fp8", (17.3, 113.4, 442.8, 3517.8)),
        (PRO, "bf16", (46.8, 316.1, 1239.3, 9856.3)),
        (PRO, "fp8+fp8", (26.5, 177.2, 693.9, 5516.4)),
        (PRO, "fp8", (24.7, 162.2, 633.9, 5036.4)),
    ],
)
def test_shipping_costs_what_was_published(model, precision, mib):
    """To a twentieth of a MiB, at 4K, 32K, 128K and 1M tokens."""
    for tokens, expected in zip((4096, 32768, 131072, MILLION), mib, strict=True):
        assert table_of(model, tokens)["precisions"][precision]["ship"]["total_mib"] == pytest.approx(
            expected, abs=0.051
        )


@pytest.mark.parametrize(
    ("model", "window", "c4a", "raw", "total", "online"),
    [(FLASH, 4.71, 3.28, 10.0, 18.0, 8.1), (PRO, 6.64, 4.69, 15.5, 26.8, 11.5)],
)
def test_a_running_request_costs_what_was_published(model, window, c4a, raw, total, online):
    """Three window pages and the rings, in MiB."""
    live = table_of(model)["precisions"]["fp8"]["live_request"]
    keys = ("window_bytes", "c4a_and_index_state_bytes", "c128a_state_bytes", "total_bytes", "total_bytes_online")
    assert [live[key] / MILLION for key in keys] == pytest.approx([window, c4a, raw, total, online], abs=0.06)


def test_bytes_a_token_are_the_published_ones():
    """Unpadded history."""
    figures = [(FLASH, "fp8", 3514.25), (FLASH, "fp8+fp8", 3850.25), (PRO, "fp8", 5031.44), (PRO, "fp8+fp8", 5511.44)]
    figures += [(FLASH, "bf16", 6880.0), (PRO, "bf16", 9848.0)]
    for model, precision, expected in figures:
        one = table_of(model)["precisions"][precision]
        assert one["history_bytes_per_token"] == pytest.approx(expected, abs=0.005)
        compressed = sum(one["streams"][name]["bytes_per_token"] for name in ("c4a", "index", "c128a"))
        assert compressed == pytest.approx(expected, abs=0.005)


def test_sixty_gigabytes_hold_the_published_number_of_tokens():
    """About 17 M tokens of Flash, 12 M of Pro, in 60 GB."""
    for model, millions in ((FLASH, 17), (PRO, 12)):
        capacity = table_of(model, gib=60e9 / (1 << 30))["precisions"]["fp8"]["capacity"]
        assert capacity["tokens"] / 1e6 == pytest.approx(millions, abs=0.8)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_allocated_pools_hold_the_tables_page_bytes(precision):
    """Measured: the bytes of real storage, page by page."""
    shape = CacheShape((0, 4, 128, 4, 128, 4), mtp_layers=1)
    table = cache_table(shape, 1024)["precisions"][precision]["pages"]
    pools = CachePools(CacheLayout(shape, precision), dict.fromkeys(PoolKind, 3))
    for kind in PoolKind:
        assert pools.storage(kind).numel() == 3 * table[kind.value]["page_bytes"]


@pytest.mark.parametrize("tokens", [1, 100, 256, 1000, 4096])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_bytes_in_segments_are_those_of_the_finest_ranges(precision, tokens):
    """What the table says of segments is what a taker demands."""
    shape = CacheShape((0, 4, 128, 4, 128, 4), mtp_layers=1)
    geometry = CacheGeometry(CacheLayout(shape, precision))
    demanded = sum(geometry.payload_bytes([part], tokens) for part in geometry.expected(tokens, 0))
    assert cache_table(shape, tokens)["precisions"][precision]["ship"]["segment_bytes"] == demanded


def test_the_command_prints_json_and_a_table(capsys):
    """Both from one computation."""
    document = json.loads(output_of(capsys, PRO, "--tokens", "1048576", "--json"))
    assert document["model"] == PRO
    assert round(document["precisions"]["bf16"]["total_gib"], 2) == 9.62
    assert "capacity" not in document["precisions"]["bf16"]
    text = output_of(capsys, FLASH, "--gib", "60")
    for figure in ("917,568", "1,647,360", "430,080", "6.7240", "3,514.25", "17,974,272"):
        assert figure in text
    assert all(len(line) < 120 for line in text.splitlines())


@pytest.mark.parametrize("as_file", [True, False])
def test_the_command_reads_a_checkpoints_config(capsys, tmp_path, as_file):
    """A directory or its config.json; V4-Flash's own gives the preset's table."""
    config = {
        "model_type": "deepseek_v4", "num_hidden_layers": 43, "num_nextn_predict_layers": 1,
        "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
        "hidden_size": 4096, "vocab_size": 129280, "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64,
        "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "rope_theta": 10000,
        "compress_rope_theta": 160000, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
        "n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "num_hash_layers": 3,
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 1048576, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    document = json.loads(output_of(capsys, str(path if as_file else tmp_path), "--json"))
    assert document["precisions"] == table_of(FLASH)["precisions"]


def test_an_unknown_model_names_the_nearest_preset(capsys, tmp_path):
    """And a config that lacks something is refused rather than guessed at."""
    with pytest.raises(ConfigError, match="did you mean deepseek-v4-flash"):
        output_of(capsys, "deepseek-v4-flesh")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", "num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"config\.json: .* is missing"):
        output_of(capsys, str(tmp_path))
