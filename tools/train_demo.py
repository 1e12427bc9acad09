"""Makes the demo model: data, training, packing, measuring. `python tools/train_demo.py COMMAND --help`.

    data     text and tokenizer from unpacked packages into .demo/
    train    on a GPU (or, slowly, without one), in calls of bounded time that go on from each other
    export   the trained state into the released names and bytes, as a checkpoint folder

The training itself needs torch, numpy, tokenizers and safetensors, and nothing of headrace.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

DATA = Path(".demo")


def data(arguments: argparse.Namespace) -> None:
    """Text from the packages, cut into tokens."""
    import numpy as np
    from demo_model import text, tokens
    from tokenizers import Tokenizer

    DATA.mkdir(exist_ok=True)
    parts = {name: text.split(whole) for name, whole in text.sources(arguments.packages).items()}
    assert all(train and held for train, held in parts.values())
    if arguments.tokenizer is not None:  # trained weights know its tokens
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    else:
        tokenizer = tokens.train(train for train, _ in parts.values())
    tokenizer.save(str(DATA / "tokenizer.json"))
    encoded = {
        part: np.concatenate(
            [
                np.array(tokenizer.encode(texts[i], add_special_tokens=False).ids, dtype=np.uint16)
                for texts in parts.values()
            ]
        )
        for i, part in enumerate(("train", "held_out"))
    }
    np.savez_compressed(DATA / "text.npz", **encoded)
    (DATA / "held_out.json").write_text(json.dumps({name: held for name, (_, held) in parts.items()}))
    for name, (train, held) in parts.items():
        print(f"{name}: {len(train):,} and {len(held):,} characters")
    print({part: len(ids) for part, ids in encoded.items()}, "tokens")


def train(arguments: argparse.Namespace) -> None:
    from demo_model.training import Plan
    from demo_model.training import train as run

    plan = Plan(steps=arguments.steps, tokens=arguments.tokens)
    if arguments.again:
        plan = Plan.second(arguments.steps, arguments.tokens, arguments.again)
    run(
        DATA, arguments.out, plan,
        resume=arguments.resume, whole=arguments.whole,
        seconds=arguments.seconds, share=arguments.share, workers=arguments.workers, compiled=arguments.compile,
    )  # fmt: skip


def export(arguments: argparse.Namespace) -> None:
    """Weights, config and tokenizer; the card is written by hand around them."""
    from demo_model import architecture, tokens
    from demo_model import export as packing
    from demo_model.network import Network, Shape
    from demo_model.training import SEED, load_state
    from safetensors.torch import save_file

    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    document = architecture.config_document()
    network = Network(Shape.of(document), SEED)
    step, history = load_state(network, arguments.state)
    values = packing.released(network)
    save_file(packing.packed(values), folder / "model.safetensors", metadata={"format": "pt"})
    if arguments.unpacked is not None:
        arguments.unpacked.mkdir(parents=True, exist_ok=True)
        plain = {name: w.contiguous() for name, w in values.items()}
        save_file(plain, arguments.unpacked / "model.safetensors", metadata={"format": "pt"})
    generation = {
        "_from_model_config": True,
        "bos_token_id": architecture.BOS_ID,
        "do_sample": True,
        "eos_token_id": architecture.EOS_ID,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    files = {"config.json": document, "generation_config.json": generation, "tokenizer_config.json": tokens.settings()}
    for target in [folder, *([arguments.unpacked] if arguments.unpacked else [])]:
        for name, content in files.items():
            (target / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        (target / "tokenizer.json").write_bytes((DATA / "tokenizer.json").read_bytes())
    lines = [json.dumps(told) for told in history]
    (folder / "training_log.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{folder}: step {step}, {(folder / 'model.safetensors').stat().st_size:,} bytes of weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("data")
    made.add_argument("packages", type=Path, help="folder with one folder for each package of demo_model/text.py")
    made.add_argument("--tokenizer", type=Path, help="an earlier one to keep, for weights that go on learning")
    made.set_defaults(run=data)
    trained = commands.add_parser("train")
    trained.add_argument("out", type=Path, help="where the weights go, in files below 16 MiB")
    trained.add_argument("--steps", type=int, required=True)
    trained.add_argument("--tokens", type=int, default=98304, help="of one step")
    trained.add_argument("--again", type=int, default=0, help="the second training's first step: the first one's last")
    trained.add_argument("--resume", type=Path, help="an earlier OUT")
    trained.add_argument("--whole", type=Path, default=Path("/tmp/headrace-demo/state.pt"))
    trained.add_argument("--seconds", type=float, default=1e9)
    trained.add_argument("--share", type=float, default=1.0, help="of the plan's rest, to be done in these seconds")
    trained.add_argument("--workers", type=int, default=0)
    trained.add_argument("--compile", action="store_true")
    trained.set_defaults(run=train)
    exported = commands.add_parser("export")
    exported.add_argument("state", type=Path, help="what `train` left in OUT")
    exported.add_argument("folder", type=Path, help="the checkpoint's, made if it is not there")
    exported.add_argument("--unpacked", type=Path, help="another one, of the same values before they were packed")
    exported.set_defaults(run=export)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
