"""What `headrace` understands: words into a checked tree of settings, then into the room that does the work.

`headrace --help` must feel instant, so nothing here imports a room before its command is known. Every flag that names
a setting has the setting's key as its destination; `--set KEY=VALUE` reaches those without a flag of their own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import ConfigError, HeadraceError
from .layout import add_arguments as add_layout_arguments
from .layout import run as print_layout

if TYPE_CHECKING:
    from ..config.tree import Config

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
"""128 and the signal's number, as shells have it."""
EXIT_CONFIG = 2
"""Also argparse's. A supervisor does not start such a child again: it would say the same."""


def main(words: Sequence[str] | None = None) -> None:
    """Entry point of the console script; ends the process with the command's exit status."""
    sys.exit(run(sys.argv[1:] if words is None else words))


def run(words: Sequence[str]) -> int:
    """Run one command line; its exit status."""
    parser = make_parser()
    arguments = parser.parse_args(words)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except ConfigError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except HeadraceError as error:
        print(f"headrace: {error.reason}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        # Before a command's own handlers stand, as while `serve` looks for ports: nothing to drain yet.
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # `headrace layout | head`: the reader has what it wanted. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def make_parser() -> argparse.ArgumentParser:
    """The whole grammar."""
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="DeepSeek-V4 served with prefill and decode in different processes, bit for bit equal to one.",
        epilog="Settings come from --config FILE, then HEADRACE_SECTION__KEY in the environment, then flags.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, command: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        added.set_defaults(command=command)
        return added

    serve = add("serve", _serve, "supervise one host: a router and its workers as separate processes")
    _add_model(serve)
    _add_arithmetic(serve)
    serve.add_argument("--prefill", dest="serve.prefill", metavar="N", help="prefill workers (default 1)")
    serve.add_argument("--decode", dest="serve.decode", metavar="M", help="decode workers (default 1)")
    serve.add_argument(
        "--monolithic",
        dest="serve.monolithic",
        action="store_const",
        const=True,
        help="both phases in each worker: the yardstick. --decode says how many",
    )
    _add_edge(serve)
    _add_settings(serve)

    router = add("router", _router, "start the HTTP and gRPC edge; needs neither torch nor nixl")
    _add_model(router)
    _add_edge(router)
    router.add_argument(
        "--worker",
        dest="router.workers",
        action="append",
        metavar="HOST:PORT",
        help="engine address of a worker; repeat for more",
    )
    _add_settings(router)
    _add_parent(router)

    for role, command in (("prefill", _prefill), ("decode", _decode)):
        worker = add(role, command, f"start one {role} worker")
        _add_model(worker)
        _add_arithmetic(worker)
        worker.add_argument("--worker-id", dest="worker.worker_id", metavar="ID", help=f"default {role}-0")
        worker.add_argument("--host", dest="worker.host", metavar="HOST", help="default 127.0.0.1")
        worker.add_argument("--engine-port", dest="worker.engine_port", metavar="PORT", help="for routers (7100)")
        worker.add_argument("--peer-port", dest="worker.peer_port", metavar="PORT", help="for workers (7101)")
        worker.add_argument(
            "--status-port", dest="worker.status_port", metavar="PORT", help="/live /ready /metrics /state (8080)"
        )
        _add_settings(worker)
        _add_parent(worker)

    # Without help it is not listed: a worker starts it.
    transfers = commands.add_parser(
        "transfer", description="A worker's transfers. Workers start it; it is of no use by hand.", allow_abbrev=False
    )
    transfers.set_defaults(command=_transfer)
    transfers.add_argument("--socket", type=int, required=True)
    transfers.add_argument("--log-level", required=True)
    _add_parent(transfers)

    layout = add("layout", print_layout, "print what the cache of a model costs, by layer class and precision")
    add_layout_arguments(layout)

    demo = add("demo", _demo, "serve the demo model, ask it something and show what happened")
    demo.add_argument("--once", action="store_true", help="exit after the answer instead of serving on")
    demo.add_argument("--prompt", default="Tell me about the river.", help="what to ask")
    _add_edge(demo)
    _add_settings(demo)

    add("version", _version, "print versions of headrace and what it stands on")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model.path", metavar="MODEL", help="directory with config.json, safetensors files and a tokenizer"
    )
    parser.add_argument(
        "--served-model-name", dest="model.served_names", action="append", metavar="NAME", help="repeat for aliases"
    )


def _add_arithmetic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", dest="model.device", metavar="auto|cpu|cuda")
    parser.add_argument("--dtype", dest="model.dtype", metavar="auto|fp32|bf16", help="fp32: to be judged by an oracle")
    parser.add_argument(
        "--kv-dtype", dest="model.kv_dtype", metavar="auto|fp32|bf16|fp8", help="fp8: with fp4 indexer keys"
    )
    parser.add_argument(
        "--gpu-memory-utilization", dest="cache.gpu_memory_utilization", metavar="PART",
        help="of the GPU's memory, for each worker (0, the default: 0.9, divided by the workers of serve)",
    )  # fmt: skip
    parser.add_argument("--max-model-len", dest="model.max_model_len", metavar="TOKENS", help="prompt and output")
    parser.add_argument(
        "--max-num-batched-tokens", dest="engine.max_num_batched_tokens", metavar="TOKENS", help="of one step"
    )


def _add_edge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", dest="router.host", metavar="HOST", help="default 127.0.0.1")
    parser.add_argument("--port", dest="router.port", metavar="PORT", help="HTTP, default 8000; 0: any free one")
    parser.add_argument(
        "--grpc", dest="router.grpc_enabled", action="store_const", const=True, help="serve headrace.v1.Generation too"
    )
    parser.add_argument("--grpc-port", dest="router.grpc_port", metavar="PORT", help="default 50051")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML with a table for each section")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting; repeat for more")
    parser.add_argument("--log-level", dest="log_level", metavar="debug|info|warning|error")
    parser.add_argument(
        "--otlp-traces-endpoint", dest="otlp_traces_endpoint", metavar="URL", help="send spans of requests there"
    )


def _add_parent(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--die-with", type=int, metavar="PID", help=argparse.SUPPRESS)


def settings(arguments: argparse.Namespace, **forced: object) -> Config:
    """The tree that a command line means, over the process's environment.

    Args:
        forced: keys (with `__` for the dot) that this command decides itself, unless the words say otherwise.
    """
    from ..config.load import ENV_CONFIG, FIELDS, load

    flags: dict[str, object] = {key.replace("__", "."): value for key, value in forced.items()}
    for item in arguments.set:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f'--set takes KEY=VALUE, not "{item}"')
        flags[key] = value
    flags.update({key: value for key, value in vars(arguments).items() if key in FIELDS and value is not None})
    file = arguments.config
    if file is None and os.environ.get(ENV_CONFIG):
        file = Path(os.environ[ENV_CONFIG])
    return load(file, os.environ, flags)


def _serve(arguments: argparse.Namespace) -> int:
    from .logs import start_logging
    from .serve import serve

    config = settings(arguments)
    start_logging(config.log_level)
    return serve(config)


def _router(arguments: argparse.Namespace) -> int:
    _begin(arguments)
    config = settings(arguments)
    from .logs import start_logging

    start_logging(config.log_level)
    from ..router.main import run

    return run(config)


def _prefill(arguments: argparse.Namespace) -> int:
    config = _worker_settings(arguments, "prefill")
    if config.worker.role == "both":
        return _both(config)
    from ..prefill.main import run

    return run(config)


def _decode(arguments: argparse.Namespace) -> int:
    config = _worker_settings(arguments, "decode")
    if config.worker.role == "both":
        return _both(config)
    from ..decode.main import run

    return run(config)


def _both(config: Config) -> int:
    """One worker that takes every kind of leg; the rooms of the two roles do not know each other."""
    from ..decode.legs import LEGS as DECODE_LEGS
    from ..prefill.legs import LEGS as PREFILL_LEGS
    from ..worker.process import run

    return run(config, {**PREFILL_LEGS, **DECODE_LEGS})


def _transfer(arguments: argparse.Namespace) -> int:
    """A worker's transfers, in a process of their own."""
    _begin(arguments)
    from .logs import start_logging

    start_logging(arguments.log_level)
    from ..worker.transfer_child import run

    return run(arguments.socket)


def _worker_settings(arguments: argparse.Namespace, role: str) -> Config:
    """Settings of one worker, resolved against this machine; `--set worker.role=both` makes it do both phases."""
    _begin(arguments)
    config = settings(arguments, worker__role=role, worker__worker_id=f"{role}-0")
    from .logs import start_logging

    start_logging(config.log_level)
    from ..config.resolve import resolve
    from .host import inspect_host

    return resolve(config, inspect_host(device_is_open=config.model.device == "auto"))


def _begin(arguments: argparse.Namespace) -> None:
    if arguments.die_with is not None:
        from .parent import die_with

        die_with(arguments.die_with)


def _demo(arguments: argparse.Namespace) -> int:
    from .demo import demo

    return demo(settings(arguments), prompt=arguments.prompt, once=arguments.once)


def _version(arguments: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    from .. import __version__

    print(f"headrace {__version__}")
    print(f"python {sys.version.split()[0]}")
    for name in ("torch", "nixl-cu13", "grpcio", "protobuf", "fastapi", "tokenizers"):
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} (not installed)")
    return 0
