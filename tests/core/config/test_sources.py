"""File, environment and flags merge in that order. Oracle: the last source that names an option (hypothesis)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.builtin import BUILTINS
from freetoken.config.engine_options import CoreOptions
from freetoken.config.sources import FlagValue, OptionTable, Settings, merge, read_config_file, refuse_flag
from freetoken.plugin.manager import build_plugins
from freetoken.plugin.selection import Selection
from freetoken.vocab.errors import OptionError

PLUGINS = build_plugins(Selection(), BUILTINS)
TABLE = OptionTable.of(PLUGINS.catalogs.options)


def merged(
    flags: tuple[FlagValue, ...] = (), env: dict[str, str] | None = None, file: dict[str, object] | None = None
) -> Settings:
    return merge(
        TABLE, flags=flags, environment=env or {}, file=file or {}, file_name="freetoken.toml", records=PLUGINS.records
    )


maybe = st.none() | st.integers(1, 65535)


@given(file=maybe, env=maybe, flag=maybe)
def test_the_strongest_source_wins_and_is_remembered(file: int | None, env: int | None, flag: int | None) -> None:
    settings = merged(
        flags=() if flag is None else (FlagValue("--port", str(flag)),),
        env={} if env is None else {"FREETOKEN_PORT": str(env)},
        file={} if file is None else {"port": file},
    )
    expected = next((v for v in (flag, env, file) if v is not None), 1919)
    origin = next(
        (o for v, o in ((flag, "--port"), (env, "FREETOKEN_PORT"), (file, "freetoken.toml: port")) if v is not None),
        "default",
    )
    value = settings.values["core", "port"]
    assert (value.value, value.origin) == (expected, origin)
    assert settings.core(CoreOptions).port == expected


def test_defaults_are_the_classs() -> None:
    assert merged().core(CoreOptions) == CoreOptions()


def test_repeated_flags_add_up() -> None:
    flags = (FlagValue("--kernel", "rope=torch"), FlagValue("--kernel", "sample=torch"))
    assert merged(flags=flags).core(CoreOptions).kernel == ("rope=torch", "sample=torch")


def test_unknown_keys_are_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"known: .*port(.|\n)*did you mean port"):
        merged(file={"prot": 1})
    with pytest.raises(OptionError, match="no such section"):
        merged(file={"nothing": {"x": 1}})


def test_a_blocked_plugins_section_is_reported_as_blocked() -> None:
    plugins = build_plugins(Selection.of(["no:core-extra", "no:warmup-none"]), BUILTINS)
    with pytest.raises(OptionError, match="warmup-none is blocked"):
        merge(
            OptionTable.of(plugins.catalogs.options), flags=(), environment={}, file={"warmup-none": {"x": 1}},
            file_name="freetoken.toml", records=plugins.records,
        )  # fmt: skip


def test_unknown_variables_warn_by_name() -> None:
    warnings = merged(env={"FREETOKEN_PROT": "1", "PATH": "x"}).warnings
    assert len(warnings) == 1
    assert "FREETOKEN_PROT" in warnings[0]
    assert "FREETOKEN_PORT" in warnings[0]


def test_secrets_are_not_shown() -> None:
    settings = merged(env={"FREETOKEN_API_KEY": "hush"})
    assert settings.core(CoreOptions).api_key == "hush"
    assert all("hush" not in str(v) for v in settings.public_values)


def test_unknown_flags_are_refused_with_the_close_ones() -> None:
    with pytest.raises(OptionError, match="--port"):
        refuse_flag("--prot", TABLE)


def test_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_config_file(None) == ({}, "freetoken.toml")
    with pytest.raises(OptionError, match="no such file"):
        read_config_file("absent.toml")
    (tmp_path / "freetoken.toml").write_text("port = ")
    with pytest.raises(OptionError, match="cannot be read"):
        read_config_file(None)
