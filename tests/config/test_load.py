"""The tree of settings is built from file, environment and flags, or refused with the key named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.load import FIELDS, RANGES, SECRET_KEYS, as_flags, flatten, load, replace
from headrace.config.tree import Config
from headrace.core.errors import ConfigError


def test_defaults_are_the_tree_itself():
    """Nothing said, nothing changed."""
    assert load() == Config()


def test_later_sources_win(tmp_path: Path):
    """Flags beat the environment, which beats the file, key by key."""
    file = tmp_path / "headrace.toml"
    file.write_text('log_level = "debug"\n[router]\nport = 1000\nmax_queue = 7\nattempts = 2\n')
    environment = {"HEADRACE_ROUTER__PORT": "2000", "HEADRACE_ROUTER__MAX_QUEUE": "8"}
    config = load(file, environment, {"router.port": "3000"})
    assert (config.router.port, config.router.max_queue, config.router.attempts) == (3000, 8, 2)
    assert config.log_level == "debug"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"flags": {"router.prot": "1"}}, "router.port"),
        ({"flags": {"model.kv_dtyp": "fp8"}}, "model.kv_dtype"),
        ({"environment": {"HEADRACE_ENGINE__MAX_NUM_SEQ": "3"}}, "engine.max_num_seqs"),
        ({"environment": {"HEADRACE_ROUTR__PORT": "3"}}, "router.port"),
    ],
)
def test_unknown_key_names_the_nearest(source: dict[str, dict[str, str]], expected: str):
    """A mistyped key is an error that says which was meant."""
    with pytest.raises(ConfigError, match=f'did you mean "{expected}"'):
        load(**source)  # type: ignore[arg-type]


def test_unknown_key_in_file_names_the_nearest_and_the_file(tmp_path: Path):
    """Tables and root keys alike."""
    for text, meant in (("[transfer]\nwindw = 3\n", "transfer.window"), ('log_levle = "info"\n', "log_level")):
        file = tmp_path / "wrong.toml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=f'did you mean "{meant}"') as caught:
            load(file)
        assert str(file) in str(caught.value)


def test_environment_leaves_names_of_others_alone():
    """Kubernetes sets HEADRACE_PORT and the like for a service called headrace; only names with __ are settings."""
    assert (
        load(environment={"HEADRACE_PORT": "tcp://10.0.0.1:80", "HEADRACE_SERVICE_HOST": "x", "PATH": ""}) == Config()
    )
    assert load(environment={"HEADRACE_LOG_LEVEL": "error"}).log_level == "error"


def test_api_keys_come_from_environment_or_file_never_from_flags(tmp_path: Path):
    """A command line is seen by everyone on the host."""
    assert load(environment={"HEADRACE_API_KEY": "one, two"}).router.api_keys == ("one", "two")
    file = tmp_path / "keys.toml"
    file.write_text('[router]\napi_keys = ["three"]\n')
    assert load(file).router.api_keys == ("three",)
    with pytest.raises(ConfigError, match="secret"):
        load(flags={"router.api_keys": "four"})


def test_api_keys_are_never_shown(tmp_path: Path):
    """Neither in a repr, nor as words for a child, nor in an error about them."""
    config = load(environment={"HEADRACE_API_KEY": "hush"})
    assert "hush" not in repr(config)
    assert "hush" not in " ".join(as_flags(config))
    file = tmp_path / "keys.toml"
    file.write_text('[router]\napi_keys = "hush"\n')
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[router]\nport = "8000"\n', "router.port .* expected a whole number"),
        ("[router]\nport = true\n", "router.port .* expected a whole number"),
        ("[router]\nport = 80000\n", "router.port .* expected 0 to 65535"),
        ("[router]\ngrpc_enabled = 1\n", "router.grpc_enabled .* expected true or false"),
        ("[router]\ncors_origins = 'x'\n", "router.cors_origins .* expected a list"),
        ("[transfer]\npeer_share = 0.0\n", "transfer.peer_share .* expected 0.001 to 1"),
        ("[transfer]\nlease_s = nan\n", "transfer.lease_s .* finite"),
        ("[model]\nkv_dtype = 'fp16'\n", "model.kv_dtype .* expected one of auto, fp32, bf16, fp8"),
        ("[model]\npath = 3\n", "model.path .* expected text"),
        ("router = 3\n", "unknown setting"),
        ("= 3\n", "not TOML"),
    ],
)
def test_file_types_are_strict(tmp_path: Path, text: str, complaint: str):
    """A value of another type or out of range is refused with the key and what was expected."""
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load(file)


def test_missing_file_is_a_config_error(tmp_path: Path):
    """Not an OSError from somewhere inside."""
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("cache.memory_bytes", "3GiB", 3 << 30),
        ("cache.memory_bytes", "512 MiB", 512 << 20),
        ("serve.monolithic", "True", True),
        ("serve.restart", "0", False),
        ("transfer.lease_s", "12", 12.0),
        ("router.workers", "a:1, b:2", ("a:1", "b:2")),
    ],
)
def test_text_is_read_by_the_type_of_its_field(key: str, text: str, value: object):
    """Flags and environment are text; the field says what it means."""
    assert flatten(load(flags={key: text}))[key] == value


@pytest.mark.parametrize(
    "flags",
    [
        {"serve.prefill": "0"},
        {"serve.decode": "0"},
        {"serve.monolithic": "true", "serve.decode": "0"},
        {"transfer.beat_s": "20"},
        {"transfer.window": "17"},
        {"router.grpc_enabled": "true", "router.grpc_port": "8000"},
        {"router.workers": "nowhere"},
        {"router.workers": "host:99999"},
    ],
)
def test_contradictions_are_refused(flags: dict[str, str]):
    """Settings that are well-formed alone and wrong together."""
    with pytest.raises(ConfigError):
        load(flags=flags)


def test_ranges_name_only_fields_that_exist_and_admit_the_defaults():
    """The table cannot drift from the tree."""
    defaults = flatten(Config())
    for key, (low, high) in RANGES.items():
        value = defaults[key]
        assert isinstance(value, int | float)
        assert low <= value <= high, key
    numbers = {key for key, value in defaults.items() if type(value) in (int, float)}
    assert numbers == set(RANGES)
    assert set(FIELDS) >= SECRET_KEYS


def test_tree_is_frozen():
    """Nobody changes a setting in passing."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().router.port = 1  # type: ignore[misc]


_TEXT = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=8)


@given(
    port=st.integers(0, 65535),
    share=st.floats(0.001, 1.0),
    path=_TEXT,
    workers=st.lists(st.builds("{}:{}".format, _TEXT, st.integers(1, 65535)), max_size=3),
    monolithic=st.booleans(),
)
def test_flags_rebuild_the_tree(port: int, share: float, path: str, workers: list[str], monolithic: bool):
    """What a parent has, its child gets by words alone."""
    config = replace(
        Config(),
        {
            "router.port": port,
            "transfer.peer_share": share,
            "model.path": path,
            "router.workers": workers,
            "serve.monolithic": monolithic,
        },
    )
    words = as_flags(config)
    assert words[::2] == ["--set"] * (len(words) // 2)
    assert load(flags=dict(word.split("=", 1) for word in words[1::2])) == config
