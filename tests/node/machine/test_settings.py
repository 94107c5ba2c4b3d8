"""Settings: precedence, and a bad value that names the flag or variable it came from."""

import os
import sys
from pathlib import Path

import pytest

from exo_node.node.cli.client import client_settings
from exo_node.node.machine.setting_values import is_loopback
from exo_node.node.machine.settings import (
    SOURCES,
    check_mlx_extras,
    forget_variables_of_libraries,
    installed_distributions,
    load_settings,
    runner_environment,
    take_environment_file,
    unknown_variables,
)
from exo_node.placement.errors import InvalidSettings


def test_defaults_are_a_loopback_node_with_nothing_set() -> None:
    settings = load_settings({}, {})
    assert (settings.host, settings.port, settings.grpc_port) == ("127.0.0.1", 52415, 52416)
    assert settings.name
    assert settings.data_dir.name == "exo-node"
    assert settings.mdns and not settings.offline
    assert settings.dtype == "auto"
    assert settings.peers == ()
    unset = (settings.interface, settings.models_dirs, settings.memory_limit, settings.api_key)
    assert unset == (None, (), None, None)
    assert settings.native_mtp_enabled is None
    assert settings.native_mtp_async_draft_eval is None


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_default() -> None:
    environ = {"EXO_PORT": "7000", "EXO_NAME": "beta", "EXO_MDNS": "0"}
    settings = load_settings({"port": "8000", "name": None}, environ)
    assert (settings.port, settings.name, settings.mdns) == (8000, "beta", False)


def test_an_empty_variable_counts_as_unset() -> None:
    empty = dict.fromkeys((source.variable for source in SOURCES.values()), " ")
    assert load_settings({}, empty) == load_settings({}, {})


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("EXO_NAME", " mac studio ", "name", "mac studio"),
        ("EXO_HOST", "::1", "host", "::1"),
        ("EXO_HOST", "[::1]", "host", "::1"),
        ("EXO_HOST", "localhost", "host", "localhost"),
        ("EXO_PORT", "0", "port", 0),
        ("EXO_GRPC_PORT", "65535", "grpc_port", 65535),
        ("EXO_INTERFACE", "192.168.1.4", "interface", "192.168.1.4"),
        ("EXO_PEER", "10.0.0.2:52416, mac.local:9", "peers", ("10.0.0.2:52416", "mac.local:9")),
        ("EXO_PEER", "[fe80::1]:9,[fe80::1]:9", "peers", ("[fe80::1]:9",)),
        (
            "EXO_ALLOWED_HOSTS",
            "Host.docker.internal, mac.ts.net:8443,[fd7a::1],",
            "allowed_hosts",
            ("host.docker.internal", "mac.ts.net:8443", "[fd7a::1]"),
        ),
        (
            "EXO_ALLOWED_ORIGINS",
            "http://localhost:3000,app://obsidian.md, Chrome-Extension://abc",
            "allowed_origins",
            ("http://localhost:3000", "app://obsidian.md", "chrome-extension://abc"),
        ),
        ("EXO_CLUSTER_KEY_FILE", __file__, "cluster_key_file", Path(__file__)),
        ("EXO_MODELS_DIR", "/:/tmp:/", "models_dirs", (Path("/"), Path("/tmp"))),
        ("EXO_DATA_DIR", "~/x", "data_dir", Path("~/x").expanduser()),
        ("EXO_MDNS", "off", "mdns", False),
        ("EXO_OFFLINE", "1", "offline", True),
        ("EXO_DTYPE", "BFloat16", "dtype", "bfloat16"),
        ("EXO_LOG_FORMAT", "json", "log_format", "json"),
        ("EXO_NATIVE_MTP_ENABLED", "0", "native_mtp_enabled", False),
        ("EXO_NATIVE_MTP_ASYNC_DRAFT_EVAL", "yes", "native_mtp_async_draft_eval", True),
        ("EXO_NATIVE_MTP_ADAPTIVE", "0", "native_mtp_adaptive", False),
        ("EXO_NATIVE_MTP_DEFAULT_K", " 3 ", "native_mtp_default_k", 3),
        ("EXO_PREFIX_CACHE_ENABLED", "0", "prefix_cache_enabled", False),
        ("EXO_PREFIX_DISK_GB", "0", "prefix_disk_gb", 0.0),
        ("EXO_PREFIX_DISK_GB", " 1.5 ", "prefix_disk_gb", 1.5),
        ("EXO_KV_BITS", "8", "kv_bits", 8),
        ("EXO_KV_BITS", "off", "kv_bits", 0),
        ("EXO_LOAD_TIMEOUT", "3600", "load_timeout", 3600),
        ("EXO_TIMING", "Local", "timing", "local"),
        ("EXO_KERNELS", " MLX ", "kernels", "mlx"),
        ("EXO_MEMORY_LIMIT", "12GB", "memory_limit", 12 * 10**9),
        ("EXO_MEMORY_LIMIT", "12GiB", "memory_limit", 12 * 2**30),
        ("EXO_MEMORY_LIMIT", "1.5 tib", "memory_limit", 3 * 2**39),
        ("EXO_MEMORY_LIMIT", "512mb", "memory_limit", 512 * 10**6),
        ("EXO_MEMORY_LIMIT", "12884901888", "memory_limit", 12 * 2**30),
        ("EXO_MEMORY_LIMIT", "12884901888B", "memory_limit", 12 * 2**30),
        ("EXO_MEMORY_LIMIT", "999999999999999999", "memory_limit", 10**18 - 1),
    ],
)
def test_a_variable_sets_its_field(variable: str, text: str, field: str, value: object) -> None:
    assert getattr(load_settings({}, {variable: text}), field) == value


_BAD: dict[str, tuple[str, ...]] = {
    "name": ("x" * 64, "a\x1bb"),
    "host": ("http://here", "a..b", "a" * 64),
    "port": ("70000", "-1", "http"),
    "grpc_port": ("1.5",),
    "interface": ("en0", "0.0.0.0", "224.0.0.251"),
    "models_dirs": ("/no/such/folder",),
    "peers": (
        *("10.0.0.2", "10.0.0.2:0", ":52416", "fe80::1:52416", "[mac.local]:52416"),
        "10.0.0.2:52416,other",
    ),
    "cluster_key_file": ("/no/such/file",),
    "memory_limit": ("lots", "12G", "-12GB", "12", "1e9"),
    "dtype": ("int4",),
    "log_format": ("xml",),
}
_BAD_VARIABLES: dict[str, tuple[str, ...]] = {
    **_BAD,
    "mdns": ("2",),
    "offline": ("maybe",),
    "allowed_hosts": ("*", "http://mac.lan", "mac.lan:port", "fd7a::1"),
    "allowed_origins": ("*", "localhost:3000", "http://localhost:3000/"),
    "native_mtp_enabled": ("nope",),
    "native_mtp_async_draft_eval": ("?",),
    "native_mtp_default_k": ("0", "9", "two"),
    "kv_bits": ("3", "-8", "on"),
    "prefix_disk_gb": ("4GB", "-1", "nan"),
    "load_timeout": ("0",),
    "timing": ("fast",),
    "kernels": ("cuda", "1"),
}


@pytest.mark.parametrize(("field", "text"), [(f, text) for f in _BAD for text in _BAD[f]])
def test_a_bad_value_names_the_flag_that_gave_it(field: str, text: str) -> None:
    variable, flag = SOURCES[field].variable, SOURCES[field].flag
    value: object = [text] if field == "peers" else text
    with pytest.raises(InvalidSettings) as caught:
        load_settings({field: value}, {variable: "also bad:"})
    _assert_names(caught.value, str(flag), not_in=variable)


@pytest.mark.parametrize(
    ("field", "text"), [(f, text) for f in _BAD_VARIABLES for text in _BAD_VARIABLES[f]]
)
def test_a_bad_value_names_the_variable_that_gave_it(field: str, text: str) -> None:
    variable, flag = SOURCES[field].variable, SOURCES[field].flag
    with pytest.raises(InvalidSettings) as caught:
        load_settings({field: None} if flag else {}, {variable: text})
    _assert_names(caught.value, variable, not_in=flag or "--")


def _assert_names(error: InvalidSettings, origin: str, *, not_in: str) -> None:
    assert error.param == origin
    assert error.message.startswith(f"{origin}: ")
    assert not_in not in error.message
    assert ";" in error.message, "a remedy follows what is wrong"


@pytest.mark.parametrize("variable", ["EXO_API_KEY", "EXO_CLUSTER_KEY"])
@pytest.mark.parametrize("secret", ["two words", "schlüssel", "line\nbreak"])
def test_a_bad_key_is_refused_without_being_shown(variable: str, secret: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        load_settings({}, {variable: secret})
    assert caught.value.param == variable
    assert secret not in f"{caught.value} {caught.value.__cause__}"


def test_keys_do_not_show_in_a_repr() -> None:
    settings = load_settings({}, {"EXO_API_KEY": "k-123", "EXO_CLUSTER_KEY": "c-456"})
    assert settings.api_key is not None and settings.api_key.get_secret_value() == "k-123"
    assert "k-123" not in repr(settings) and "c-456" not in repr(settings)


@pytest.mark.parametrize("field", ["api_key", "cluster_key", "native_mtp_enabled", "colour"])
def test_a_key_that_is_no_flag_is_a_programming_error(field: str) -> None:
    with pytest.raises(TypeError, match=field):
        load_settings({field: "x"}, {})


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "::", "my-mac.local"])
def test_other_machines_are_let_in_only_with_a_key(host: str) -> None:
    with pytest.raises(InvalidSettings, match="EXO_API_KEY") as caught:
        load_settings({"host": host}, {})
    assert caught.value.param == "--host"
    with pytest.raises(InvalidSettings) as caught:
        load_settings({}, {"EXO_HOST": host})
    assert caught.value.param == "EXO_HOST"
    assert load_settings({"host": host}, {"EXO_API_KEY": "k"}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    assert load_settings({"host": host}, {}).host == host


@pytest.mark.parametrize(
    ("flags", "environ", "origin"),
    [
        ({"port": "52416"}, {}, "--port"),
        ({"grpc_port": "52415"}, {}, "--grpc-port"),
        ({}, {"EXO_PORT": "52416"}, "EXO_PORT"),
        ({"port": "9000"}, {"EXO_GRPC_PORT": "9000"}, "EXO_GRPC_PORT"),
    ],
)
def test_one_port_cannot_serve_both(
    flags: dict[str, object], environ: dict[str, str], origin: str
) -> None:
    with pytest.raises(InvalidSettings) as caught:
        load_settings(flags, environ)
    assert caught.value.param == origin


def test_two_free_ports_are_two_ports() -> None:
    assert load_settings({"port": "0", "grpc_port": "0"}, {}).grpc_port == 0


def test_a_key_file_given_by_flag_wins_over_the_key_variable() -> None:
    settings = load_settings({"cluster_key_file": __file__}, {"EXO_CLUSTER_KEY": "abc"})
    assert settings.cluster_key is None and settings.cluster_key_file == Path(__file__)


def test_two_variables_with_a_cluster_key_are_refused() -> None:
    with pytest.raises(InvalidSettings, match="EXO_CLUSTER_KEY_FILE"):
        load_settings({}, {"EXO_CLUSTER_KEY": "abc", "EXO_CLUSTER_KEY_FILE": __file__})


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("EXO_MODELS_DIRS", "EXO_MODELS_DIR"),
        ("EXO_NATIVE_MTP_ENABLE", "EXO_NATIVE_MTP_ENABLED"),
        ("EXO_PEERS", "EXO_PEER"),
        ("EXO_SOMETHING_ELSE", None),
    ],
)
def test_an_unknown_variable_is_named_with_its_nearest(variable: str, near: str | None) -> None:
    (sentence,) = unknown_variables({variable: "sec-ret", "EXO_PORT": "1", "HOME": "/"})
    assert sentence.startswith(f"{variable} ")
    assert "sec-ret" not in sentence
    assert sentence.endswith(f"did you mean {near}?") if near else "mean" not in sentence


def test_variables_of_libraries_that_could_only_do_harm_are_forgotten_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harmful = ("GRPC_SSL_CIPHER_SUITES", "HF_HUB_ETAG_TIMEOUT", "PROMETHEUS_MULTIPROC_DIR")
    stay = ("GRPC_TRACE", "HF_HUB_CACHE", "HF_TOKEN", "http_proxy", "NO_PROXY", "SSL_CERT_FILE")
    for name in (*harmful, *stay):
        monkeypatch.setenv(name, "sec-ret")
    for name in ("GRPC_VERBOSITY", "HF_HUB_DISABLE_TELEMETRY"):  # set here, and unset afterwards
        monkeypatch.setenv(name, "0")
    names = forget_variables_of_libraries()
    assert {*harmful} <= {*names} and not {*stay} & {*names}
    assert all(name not in os.environ for name in harmful)
    assert all(os.environ[name] == "sec-ret" for name in stay)
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    sentences = unknown_variables(os.environ, names)
    assert "GRPC_SSL_CIPHER_SUITES has no effect on exo-node" in sentences
    assert "sec-ret" not in " ".join(sentences)


@pytest.mark.parametrize(
    ("flags", "environ", "port"),
    [
        ({}, {}, None),
        ({}, {"EXO_PORT": "0"}, None),
        ({}, {"EXO_PORT": "7000"}, 7000),
        ({"data_dir": "/x"}, {"EXO_PORT": "7000"}, None),
        ({"data_dir": "/x", "port": "8000"}, {"EXO_PORT": "7000"}, 8000),
    ],
)
def test_a_command_finds_its_node_by_the_most_specific_hint(
    flags: dict[str, str], environ: dict[str, str], port: int | None
) -> None:
    assert client_settings(flags.get("port"), flags.get("data_dir"), environ).port == port


def test_a_command_does_not_mind_settings_that_only_start_needs() -> None:
    environ = {"EXO_HOST": "0.0.0.0", "EXO_MEMORY_LIMIT": "lots"}
    assert client_settings(None, None, environ).host == "0.0.0.0"


def test_a_command_refuses_a_bad_key_without_showing_it() -> None:
    with pytest.raises(InvalidSettings, match="EXO_API_KEY: is no key") as caught:
        _ = client_settings(None, None, {"EXO_API_KEY": "open sesame"})
    assert caught.value.param == "EXO_API_KEY" and "sesame" not in str(caught.value)
    assert "sesame" not in repr(client_settings(None, None, {"EXO_API_KEY": "sesame"}))


@pytest.mark.parametrize(
    ("distributions", "platform", "problem"),
    [
        ({"mlx", "mlx-cpu"}, "linux", None),
        ({"mlx", "mlx-cuda-13"}, "linux", None),
        ({"mlx", "mlx-metal"}, "darwin", None),
        ({"mlx"}, "linux", r"exo-node\[cpu\]"),
        ({"mlx-cpu", "mlx-cuda-13"}, "linux", "pip uninstall mlx-cpu mlx-cuda-13"),
        ({"mlx-cuda-12", "mlx-cuda-13"}, "linux", "pip uninstall mlx-cuda-12 mlx-cuda-13"),
    ],
)
def test_linux_needs_exactly_one_mlx_backend(
    distributions: set[str], platform: str, problem: str | None
) -> None:
    if problem is None:
        check_mlx_extras(distributions, platform)
        return
    with pytest.raises(InvalidSettings, match=problem):
        check_mlx_extras(distributions, platform)


def test_installed_distributions_are_read_by_their_normalised_names() -> None:
    assert {"exo-node", "mlx", "huggingface-hub"} <= installed_distributions()


def test_a_runner_keeps_what_it_compiles_where_its_node_does() -> None:
    variables = {"XDG_CACHE_HOME": "/cache", "HOME": "/me", "EXO_API_KEY": "secret"}
    inherited = runner_environment(variables)
    assert (inherited["XDG_CACHE_HOME"], inherited["HOME"]) == ("/cache", "/me")
    assert "EXO_API_KEY" not in inherited


@pytest.mark.parametrize(("system", "value"), [("darwin", "0"), ("linux", None)])
def test_macs_of_different_age_multiply_float32_alike(
    monkeypatch: pytest.MonkeyPatch, system: str, value: str | None
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert runner_environment({"MLX_ENABLE_TF32": "1"}).get("MLX_ENABLE_TF32") == value


def test_variables_of_a_file_are_those_that_are_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "environment"
    take_environment_file(file)  # it need not exist
    for name in ("EXO_API_KEY", "EXO_NAME", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "")  # so that the end of the test removes it
        monkeypatch.delenv(name)
    monkeypatch.setenv("EXO_PORT", "1")
    text = "# keys\n; more\n\nEXO_API_KEY = 'a=b c'\nEXO_PORT=2\nEXO_NAME=\"desk\"\nHTTPS_PROXY=\n"
    _ = file.write_text(f"\ufeff{text}")  # as some editors begin a file
    take_environment_file(file)
    values = [os.environ[n] for n in ("EXO_API_KEY", "EXO_PORT", "EXO_NAME", "HTTPS_PROXY")]
    assert values == ["a=b c", "1", "desk", ""]


@pytest.mark.parametrize(
    "line", ["EXO_API_KEY", "export EXO_API_KEY=secret", "=secret", "{}", "A=secret\0"]
)
def test_a_line_that_sets_nothing_is_named_without_its_text(tmp_path: Path, line: str) -> None:
    file = tmp_path / "environment"
    _ = file.write_text(f"# one\n{line}\n")
    with pytest.raises(InvalidSettings, match="environment, line 2: no NAME=VALUE") as caught:
        take_environment_file(file)
    assert "secret" not in caught.value.message


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="Is a directory"):
        take_environment_file(tmp_path)
    _ = (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidSettings, match="binary"):
        take_environment_file(tmp_path / "binary")


@pytest.mark.parametrize("value", ["0", "1", " on ", "8"])
def test_strict_mode_is_refused_with_the_remedy(value: str) -> None:
    with pytest.raises(InvalidSettings, match=r"no strict mode any more.*unset it") as refused:
        _ = load_settings({}, {"EXO_NATIVE_MTP_STRICT": value})
    assert refused.value.param == "EXO_NATIVE_MTP_STRICT"
    _ = load_settings({}, {"EXO_NATIVE_MTP_STRICT": " "})
