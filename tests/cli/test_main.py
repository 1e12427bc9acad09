"""The command line: words into settings, and errors that help."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from headrace.cli.main import make_parser, run, settings
from headrace.config.tree import Config
from headrace.core.errors import ConfigError


def parse(*words: str) -> Config:
    return settings(make_parser().parse_args(words))


def test_named_flags_reach_their_settings():
    """Each has the key of a setting as its destination."""
    config = parse(
        "serve", "models/x", "--prefill", "2", "--decode", "3", "--monolithic", "--device", "cpu", "--dtype", "fp32",
        "--kv-dtype", "bf16", "--host", "0.0.0.0", "--port", "0", "--served-model-name", "a",
        "--served-model-name", "b", "--max-num-batched-tokens", "64",
    )  # fmt: skip
    assert (config.serve.prefill, config.serve.decode, config.serve.monolithic) == (2, 3, True)
    assert (config.model.path, config.model.device) == ("models/x", "cpu")
    assert (config.model.dtype, config.model.kv_dtype) == ("fp32", "bf16")
    assert (config.router.host, config.router.port, config.model.served_names) == ("0.0.0.0", 0, ("a", "b"))
    assert config.engine.max_num_batched_tokens == 64


def test_set_reaches_every_setting_and_named_flags_win():
    """`--set` is for what has no flag of its own."""
    config = parse("router", "m", "--set", "router.port=1", "--set", "transfer.window=2", "--port", "7")
    assert (config.router.port, config.transfer.window) == (7, 2)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("serve", "m", "--set", "routr.port=1"), 'did you mean "router.port"'),
        (("serve", "m", "--set", "router.port"), "KEY=VALUE"),
        (("serve", "m", "--kv-dtype", "fp16"), "expected one of auto, fp32, bf16, fp8"),
        (("serve", "m", "--port", "many"), "expected a whole number"),
        (("serve", "m", "--set", "router.api_keys=x"), "secret"),
    ],
)
def test_wrong_settings_end_with_status_2_and_one_line(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
):
    """No trace-back for a typing error."""
    with pytest.raises(ConfigError):
        parse(*words)
    assert run(words) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_serve_without_a_checkpoint_says_so(tmp_path, capsys: pytest.CaptureFixture[str]):
    """Before any process is started."""
    assert run(["serve", str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err


def test_version_prints_what_it_stands_on(capsys: pytest.CaptureFixture[str]):
    """For bug reports; from the metadata, so that nothing heavy is imported."""
    assert run(["version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("headrace ")
    assert "\ntorch 2." in out


def test_help_is_instant_and_lists_the_commands():
    """Under 0.3 s of processor time in a fresh process, the best of three: no room is imported for it."""
    best_s = float("inf")
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-P", "-m", "headrace", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best_s = min(best_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    for command in (b"serve", b"router", b"prefill", b"decode", b"layout", b"demo", b"version"):
        assert command in done.stdout
    assert best_s < 0.3


def test_ctrl_c_before_a_command_can_drain_is_no_stack_trace(monkeypatch, capsys):
    """The status that shells know."""

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.cli.main._serve", interrupted)
    assert run(["serve", "m"]) == 130
    assert capsys.readouterr().err == ""
