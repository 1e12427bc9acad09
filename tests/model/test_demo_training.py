"""What trains the demo model computes what the engine computes, packs what the loader reads, and repeats itself."""

import random
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from demo_model import architecture, chat, export, facts, packing, sinkhorn, tasks, training
from demo_model.network import Network, Options, Shape
from oracle.plain import Plain

from headrace.model.checkpoint import load_weights
from headrace.model.config import ModelConfig
from headrace.model.demo import ensure_demo

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 384


@pytest.fixture(scope="module")
def document() -> dict[str, object]:
    """The demo's own, but with a choice that is narrow at this length."""
    return {**architecture.config_document(), "index_topk": 16}


@pytest.fixture(scope="module")
def network(document: dict[str, object]) -> Network:
    """Untrained, and nothing left at a value that hides faults."""
    made, generator = Network(Shape.of(document), 0), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name in made.names:
            value = made.w(name)
            noise = torch.randn(value.shape, generator=generator)
            if name.endswith(("wo_b.weight", ".w2")):
                value.mul_(6)
            elif name.endswith(("norm.weight", "_base", "attn_sink")):
                value.add_(noise * 0.2)
        for layer in range(made.shape.hash_layers, len(made.shape.ratios)):
            getattr(made, f"bias_{layer}").copy_(torch.randn(made.shape.experts, generator=generator) * 0.2)
    return made


def run(network: Network, ids: torch.Tensor, options: Options) -> torch.Tensor:
    network.options = options
    with torch.no_grad():
        return network.logits(network(ids[None], torch.arange(len(ids))[None]))


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(19, architecture.VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed))


def test_the_training_pass_is_the_plain_reference(network: Network, document: dict[str, object]):
    """In fp32 to the last digits, with entries beyond the choice and every kind of layer."""
    ids = tokens(3)
    expected = Plain(ModelConfig.from_dict(document), export.released(network)).logits(ids.tolist())
    assert (run(network, ids, Options()) - expected).abs().max() < 2e-5


def test_packed_weights_are_what_the_loader_reads(network: Network, document: dict[str, object], tmp_path: Path):
    """Through bytes and back is what the pass with packed weights computed with."""
    config, ids = ModelConfig.from_dict(document), tokens(4)
    save_file(export.packed(export.released(network)), tmp_path / "model.safetensors")
    expected = Plain(config, load_weights(tmp_path, config)).logits(ids.tolist())
    assert (run(network, ids, Options(packed_weights=True)) - expected).abs().max() < 2e-5


def test_all_parameters_learn(network: Network):
    """The text's loss and the indexer's own reach every parameter together, and the indexer's reaches only its own."""
    network.options = Options()
    network.zero_grad()
    hidden = network(tokens(5)[None], torch.arange(LENGTH)[None])
    torch.stack(network.index_losses).sum().backward(retain_graph=True)
    touched = {name for name in network.names if network.w(name).grad is not None and network.w(name).grad.any()}
    assert touched == {name for name in network.names if ".indexer." in name}
    network.zero_grad()
    network.logits(hidden).square().mean().backward()
    learned = {name for name in network.names if network.w(name).grad is not None and network.w(name).grad.any()}
    assert learned == set(network.names) - touched
    network.zero_grad()


def test_a_window_does_not_reach_over_a_jump_of_positions(network: Network):
    """Tokens behind a jump see nothing raw of what was before it, only entries."""
    window_only = Network(replace(network.shape, ratios=(0, 0)), 1)
    ids, other = tokens(6), tokens(7)
    other[128:] = ids[128:]
    positions = torch.arange(LENGTH)
    positions[128:] += 1280
    with torch.no_grad():
        a, b = (window_only(x[None], positions[None])[128:] for x in (ids, other))
        c, d = (window_only(x[None], torch.arange(LENGTH)[None])[128:] for x in (ids, other))
    assert torch.equal(a, b)
    assert not torch.equal(c, d)


def test_the_mix_of_streams_is_doubly_stochastic():
    mixed = sinkhorn.sinkhorn(torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(1)), 20, 1e-6)
    assert (mixed.sum(1) - 1).abs().max() < 1e-4
    assert (mixed.sum(2) - 1).abs().max() < 1e-3


def test_formats_are_those_of_the_spec():
    """Ties go to the even code; a power of two stays what it is."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert packing.to_e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert packing.power_of_two_from(torch.tensor([1.0, 1.001, 0.25, 3.0])).tolist() == [1.0, 2.0, 0.25, 4.0]


def test_the_released_config_is_the_one_that_was_trained():
    assert ModelConfig.load(ensure_demo()) == ModelConfig.from_dict(architecture.config_document())


@pytest.fixture(scope="module")
def maker() -> tasks.Maker:
    tokenizer = Tokenizer.from_file(str(ensure_demo() / "tokenizer.json"))
    text = tokenizer.encode((ROOT / "benchmarks" / "held_out.txt").read_text()).ids
    return tasks.Maker(tokenizer, np.array(text, dtype=np.uint16))


def test_batches_follow_from_their_number(maker: tasks.Maker):
    first, again, other = (tasks.batch(maker, 1, step, 4, 512) for step in (7, 7, 8))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])
    ids, weights, positions, blind = first
    assert ids.shape == weights.shape == (4, 513)
    assert not blind.any()
    assert (np.diff(positions, axis=1) >= 1).all()
    assert positions.max() < architecture.MAX_POSITION


def test_what_must_be_recalled_stood_before(maker: tasks.Maker):
    """Every run of tokens with a needle's weight is there earlier, in a place where nobody could have known it."""
    for seed in range(20):
        sequence = tasks.Sequence(700)
        maker.recall(random.Random(seed), sequence)
        runs: list[list[int]] = []
        for i, weight in enumerate(sequence.weights):
            if weight == tasks.VALUE_WEIGHT:
                if i and sequence.weights[i - 1] == tasks.VALUE_WEIGHT:
                    runs[-1].append(sequence.ids[i])
                else:
                    runs.append([sequence.ids[i]])
        assert runs
        text = " ".join(map(str, sequence.ids))
        assert all(text.count(" ".join(map(str, run))) >= 2 for run in runs)


def test_a_count_is_won_by_whom_most_ballots_are_for(maker: tasks.Maker):
    """The winner is asked for once, leads as it should, and few of 64 ballots' samples would tell."""
    right = 0
    for seed in range(40):
        rng = random.Random(seed)
        count = tasks.draw_count(rng, 600)
        tally = Counter(count.ballots).most_common(2)
        assert tally[0][0] == count.winner
        assert 1.3 < tally[0][1] / tally[1][1] < 1.5
        assert 560 < len(count.ballots) <= 600
        ((seen, _),) = Counter(rng.sample(count.ballots, 64)).most_common(1)
        right += seen == count.winner
        sequence = tasks.Sequence(2049)
        maker.count(rng, sequence)
        (at,) = (i for i, weight in enumerate(sequence.weights[:2049]) if weight == tasks.COUNT_WEIGHT)
        text = maker.tokenizer.decode(sequence.ids[:at])
        named = Counter(re.findall(r" One for (\w+)\.", text)).most_common(1)[0][0]
        assert maker.encode(f" {named}") == [sequence.ids[at]]
    assert right < 20


def test_what_is_blind_sees_no_entries_of_c4a_and_what_is_removed_is_not_seen(network: Network):
    """Row by row for c4a, all rows for a ratio."""
    small = Network(replace(network.shape, ratios=(4, 128), hash_layers=0), 1)
    ids = tokens(8)[None, :256].expand(2, -1)
    positions = torch.arange(256).expand(2, -1)
    found = {}
    for name, options, blind in (
        ("whole", Options(), None),
        ("half", Options(), torch.tensor([False, True])),
        ("no c4a", Options(removed=4), None),
        ("no c128a", Options(removed=128), None),
    ):
        small.options = options
        with torch.no_grad():
            found[name] = small(ids, positions, blind).view(2, 256, -1)
    assert torch.equal(found["half"][0], found["whole"][0])
    assert torch.equal(found["half"][1], found["no c4a"][1])
    assert not torch.equal(found["no c4a"][1], found["whole"][1])
    assert torch.equal(found["no c128a"][:, :127], found["whole"][:, :127])
    assert not torch.equal(found["no c128a"][:, 127:], found["whole"][:, 127:])


def test_words_of_the_tasks_are_one_token_each(maker: tasks.Maker):
    words = {*facts.WORDS, *facts.NOUNS, *facts.ADJECTIVES, *facts.NAMES}
    assert {word for word in words if len(maker.encode(f" {word}")) != 1} == set()


def test_conversations_have_answers(rng: random.Random):
    for _ in range(300):
        for turn in chat.conversation(rng):
            assert turn.asked
            assert turn.answer
            assert turn.about
            assert "{" not in turn.asked + turn.answer


def test_state_survives_a_call(network: Network, tmp_path: Path):
    """Large matrices come back as bf16, all else to the bit; no file is larger than may be taken home."""
    training.save_state(network, tmp_path, 17, [{"step": 17}])
    other = Network(network.shape, 9)
    assert training.load_state(other, tmp_path) == (17, [{"step": 17}])
    assert all(file.stat().st_size < 16 << 20 for file in tmp_path.iterdir())
    for name in network.names:
        a, b = network.w(name), other.w(name)
        assert torch.equal(a, b) or torch.equal(a.bfloat16().float(), b)
