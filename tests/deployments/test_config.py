"""The arguments of build_app and the checks of a whole config file."""

from __future__ import annotations

import errno
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import HTTPOptionsSchema

from deployments.config import AppConfig, checkout_root
from deployments.launcher.preflight import Endpoint, check_config, require_free_port
from engine.errors import ConfigError, ModelLoadError
from tests.engine.models.gguf.metadata import write_metadata

SHIPPED = checkout_root() / "serve_config.yaml"


def _write(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"model": "m", "replica": {}}, "unknown key 'replica' in args; did you mean 'replicas'?"),
        ({"model": "m", "limits": {"max_body": 1}}, "'max_body' in args.limits; did you mean 'max_body_bytes'?"),
        (
            {"model": "m", "zzz": 1},
            "unknown key 'zzz' in args; known keys: autoscaling, batches, chat_template,",
        ),
        ({}, "args lacks 'model'"),
        ({"model": "m", "replicas": {"num_engine_replicas": 0}}, "args.replicas.num_engine_replicas=0"),
        (
            {"model": "m", "replicas": {"num_engines": 3}},
            "'num_engines' in args.replicas; did you mean",
        ),
        ({"model": "m", "engine": {"device": "tpu"}}, "'tpu'"),
        ({"model": "m", "engine": {"max_num_seq": 1}}, "option 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ({"model": "m", "engine": {"max_num_seqs": 0}}, "max_num_seqs=0"),
        ({"model": "m", "engine": {"skip_tokenizer_init": True}}, "skip_tokenizer_init"),
        ({"model": "m", "engine": {"speculative_config": {"method": "eagle", "num_speculative_tokens": 4}}}, "'eagle'"),
        ({"model": "m", "router": {"first_token_weight": 0.5}}, "args.router.first_token_weight=0.5"),
        ({"model": "m", "router": {"kv_replication": 8}}, "args.router.kv_replication=8"),
        ({"model": "m", "router": {"kv_replication": 64}}, "kv_replication=64 needs several engines, with kv_transfer"),
        ({"model": "m", "autoscaling": {"max_replicas": 2, "min_replicas": 2}}, "num_engine_replicas=1 must lie"),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AppConfig.parse(args)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_options_that_the_shipped_file_leaves_out_can_be_put_in() -> None:
    text = SHIPPED.read_text()
    engine = text[text.index("      engine:") : text.index("      limits:")]
    args = yaml.safe_load(engine.replace("\n        # ", "\n        "))
    config = AppConfig.parse({"model": "m", **args}).engine_config
    assert config.swap_space_gib == 4
    assert config.speculation is not None
    assert (config.speculation.method, config.speculation.num_speculative_tokens) == ("ngram", 4)


@pytest.mark.parametrize(
    ("args", "transfers"),
    [
        ({}, False),
        ({"replicas": {"num_engine_replicas": 2}}, None),
        ({"autoscaling": {"max_replicas": 2}}, None),
        ({"autoscaling": {"max_replicas": 1}}, False),
        ({"engine": {"kv_transfer": True}}, True),
        ({"engine": {"kv_transfer": None}}, False),
        ({"replicas": {"num_engine_replicas": 2}, "engine": {"kv_transfer": False}}, False),
    ],
)
def test_a_single_engine_has_no_one_to_exchange_kv_with(args: dict[str, Any], transfers: bool | None) -> None:
    assert AppConfig.parse({"model": "m", **args}).engine_config.kv_transfer is transfers


def test_a_relative_model_starts_at_the_checkout() -> None:
    assert AppConfig.parse({"model": "demo/model"}).model_path == checkout_root() / "demo/model"
    assert AppConfig.parse({"model": "/models/x"}).model_path == Path("/models/x")
    assert AppConfig.parse({"model": "/models/x"}).served_name == "x"


@pytest.mark.parametrize(
    ("model", "expected"),
    [("demo/model", checkout_root() / "demo/model"), ("/models/x", "/models/x"), ("~/x", Path.home() / "x")],
)
def test_a_draft_model_is_where_the_model_would_be(model: str, expected: Path | str) -> None:
    """And not in the directory in which Ray starts a replica."""
    speculation = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    config = AppConfig.parse({"model": model, "engine": {"speculative_config": speculation}})
    assert config.engine_config.speculation is not None
    assert config.engine_config.speculation.model == str(expected) == str(config.model_path)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        AppConfig.parse({"model": str(tmp_path / "none")}).require_model()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        AppConfig.parse({"model": str(tmp_path)}).require_model()


def test_a_chat_template_is_read_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("mine")
    shipped = {"model": "demo/model"}
    for name in (None, "deepseek_v4", str(tmp_path / "mine.jinja"), "demo/model/config.json"):
        AppConfig.parse(shipped | {"chat_template": name}).require_model()
    with pytest.raises(ConfigError, match="chat_template='.*other.jinja' cannot be read"):
        AppConfig.parse(shipped | {"chat_template": str(tmp_path / "other.jinja")}).require_model()


@pytest.mark.parametrize("name", ["tekken.json", "tiktoken.model"])
def test_tokenizers_of_mistral_and_kimi_are_files_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    config = AppConfig.parse({"model": str(tmp_path)})
    with pytest.raises(ConfigError, match="holds no tokenizer; add one of .*tiktoken.model, tekken.json"):
        config.require_model()
    (tmp_path / name).write_text("")
    config.require_model()


def test_a_gguf_file_is_checked_as_a_directory_is(tmp_path: Path) -> None:
    config = AppConfig.parse({"model": str(tmp_path / "a-Q4_K_M.gguf"), "engine": {"max_model_len": 64}})
    assert config.served_name == "a-Q4_K_M"
    assert AppConfig.parse({"model": "/models/b-00001-of-00003.gguf"}).served_name == "b"
    with pytest.raises(ConfigError, match="is not a file; give the path of a GGUF file"):
        config.require_model()
    write_metadata(config.model_path, "llama")
    with pytest.raises(ConfigError, match="holds no tokenizer; give a GGUF file that has one"):
        config.require_model()
    write_metadata(config.model_path, "llama", add=lambda writer: writer.add_tokenizer_model("gpt2"))
    config.require_model()
    write_metadata(config.model_path, "llama", context_length=63)
    with pytest.raises(ConfigError, match="max_model_len=64 exceeds the model's 63 positions"):
        config.require_model()
    (tmp_path / "directory").mkdir()
    config.model_path.rename(tmp_path / "directory" / "a.gguf")
    with pytest.raises(ConfigError, match="give the path of a GGUF file itself, such as '.*a.gguf'"):
        AppConfig.parse({"model": str(tmp_path / "directory")}).require_model()


def test_the_engines_get_the_limits_of_their_queues() -> None:
    limits = {"max_queued_requests_per_engine": 7, "max_queued_prefill_tokens_per_engine": 99}
    engine = AppConfig.parse({"model": "m", "limits": limits}).engine_config
    assert (engine.max_queued_requests, engine.max_queued_prefill_tokens) == (7, 99)


def test_the_shipped_file_is_valid_and_shows_every_key() -> None:
    document = yaml.safe_load(SHIPPED.read_text())
    args = document["applications"][0]["args"]
    config = AppConfig.parse(args)
    assert (config.replicas.num_engine_replicas, config.replicas.num_ingress_replicas) == (2, 1)
    text = SHIPPED.read_text()
    parts = (config.replicas, config.limits, config.router, config.autoscaling, config.logging, config.tracing)
    for section in (config, *parts):
        for key in type(section).model_fields:
            assert f"{key}:" in text, key
    assert config.limits == type(config.limits)()
    assert config.router == type(config.router)()
    assert config.autoscaling == type(config.autoscaling)()
    assert config.logging == type(config.logging)()
    assert config.tracing == type(config.tracing)()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(aplications=[]), "unknown key 'aplications'"),
        (lambda d: d["http_options"].update(prot=1), "unknown key 'prot' in http_options; did you mean 'port'?"),
        (lambda d: d["applications"][0].update(nam="x"), "unknown key 'nam' in applications[0]; did you mean 'name'?"),
        (lambda d: d["applications"][0].update(deployments=[{"name": "engine", "num_replica": 1}]), "'num_replicas'"),
        (lambda d: d["applications"][0].update(import_path="a:b"), "import_path"),
        (lambda d: d["applications"][0]["args"].update(model="nowhere/x"), "nowhere/x"),
        (lambda d: d.update(http_options=[1]), "http_options must be a mapping"),
        (lambda d: d["http_options"].update(port="abc"), "http_options.port='abc'"),
        (
            lambda d: d["http_options"].update(request_timeout_s=9),
            "leave it out, and set args.limits.request_timeout_s",
        ),
        (lambda d: d["http_options"].update(port=0), "port=0 is not a port"),
        (lambda d: d["http_options"].update(port=99999), "port=99999 is not a port"),
        (lambda d: d.update(applications=5), "applications=5"),
        (lambda d: d["applications"][0].update(route_prefix="llm"), "route_prefix"),
        (lambda d: d["applications"][0].update(deployments=5), "deployments=5"),
    ],
)
def test_a_mistake_anywhere_in_the_file(tmp_path: Path, change: Any, message: str) -> None:
    document = yaml.safe_load(SHIPPED.read_text())
    change(document)
    path = _write(tmp_path, document)
    with pytest.raises(ConfigError) as caught:
        check_config(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["a: [", "- 1", ""])
def test_a_file_that_is_no_config(tmp_path: Path, text: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        check_config(path)


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            require_free_port(Endpoint("127.0.0.1", port, "/", "m"))
    require_free_port(Endpoint("127.0.0.1", port, "/", "m"))


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        (
            "192.0.2.1",
            "is not an address of this machine; give one of its addresses, 127.0.0.1, or 0.0.0.0",
        ),  # RFC 5737
        ("no such host", "cannot be resolved to an address of this machine; give one of its addresses"),
        ("a..b", "cannot be resolved"),
        ("fe80::1%eth0", "is of one interface only, on which HAProxy cannot listen; give one of its addresses"),
        ("fe80::1", "is of one interface only, on which HAProxy cannot listen; give one of its addresses"),
        ("ff02::1", "is of one interface only"),
        ("224.0.0.1", "is not an address of this machine; give one of its addresses"),  # can be bound, as the next two
        ("::ffff:224.0.0.1", "is not an address of this machine"),
        ("255.255.255.255", "is not an address of this machine"),
    ],
)
def test_a_host_that_is_not_this_machine(host: str, problem: str) -> None:
    if ":" in host and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with pytest.raises(ConfigError) as caught:
        require_free_port(Endpoint(host, 8000, "/", "m"))
    assert str(caught.value).startswith(f"http_options.host='{host}' {problem}")
    assert "port" not in str(caught.value)  # which may well be free


def test_ipv6_on_a_machine_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_family(*arguments: Any) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", no_family)
    with pytest.raises(ConfigError, match="http_options.host='::1' is not an address of this machine; give one"):
        require_free_port(Endpoint("::1", 80, "/", "m"))


def test_a_port_that_this_user_may_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def bind(self, address: Any) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "socket", Refusing)
    with pytest.raises(ConfigError, match=r"port 80 on 127\.0\.0\.1 cannot be used \(Permission denied\); change"):
        require_free_port(Endpoint("127.0.0.1", 80, "/", "m"))


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds no tokenizer; add one of tokenizer\.json"):
        AppConfig.parse({"model": str(tmp_path)}).require_model()


def _checkpoint(directory: Path, **config: Any) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    return str(directory)


def test_a_context_beyond_the_models_positions_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    model = _checkpoint(tmp_path, max_position_embeddings=2048)
    AppConfig.parse({"model": model, "engine": {"max_model_len": 2048}}).require_model()
    AppConfig.parse({"model": model}).require_model()
    with pytest.raises(ConfigError, match="max_model_len=2049 exceeds the model's 2048 positions; lower it"):
        AppConfig.parse({"model": model, "engine": {"max_model_len": 2049}}).require_model()
    model = _checkpoint(tmp_path, text_config={"max_position_embeddings": 1})  # only transformers reads this one
    AppConfig.parse({"model": model, "engine": {"max_model_len": 2049}}).require_model()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}, "architectures": ["Evil"]}, "names code of its own"),
        ({"quantization_config": {"quant_method": "hqq"}}, r"is quantised \(hqq\), which is not supported; give the"),
        ({"quantization_config": {"bits": "x"}}, r"is quantised \(unknown\), which is not supported; give the"),
        ({"quantization_config": "fp8"}, "quantization_config='fp8' of '.*config.json' is not an object; correct it"),
        ({"architectures": ["BertLMHeadModel"]}, "architecture 'BertLMHeadModel' is not supported: "),
        ({"architectures": ["NoSuchForCausalLM"]}, "architecture 'NoSuchForCausalLM' is not supported: no test has"),
    ],
)
def test_a_model_that_no_engine_serves_is_refused_before_one_starts(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        AppConfig.parse({"model": _checkpoint(tmp_path, **config)}).require_model()


def test_the_checks_before_the_start_import_neither_torch_nor_transformers() -> None:
    """They take seconds, in which the launcher would not have begun to start Ray."""
    code = (
        "import sys, pathlib; from deployments.launcher.preflight import check_config; "
        f"check_config(pathlib.Path({str(SHIPPED)!r})); print({{'torch', 'transformers'}} & {{*sys.modules}})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout_root(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_url_is_one_that_can_be_opened() -> None:
    assert Endpoint("0.0.0.0", 80, "/", "m").url == "http://127.0.0.1:80"
    assert Endpoint("10.0.0.1", 80, "/llm/", "m").url == "http://10.0.0.1:80/llm"
    assert Endpoint("::", 80, "/", "m").url == Endpoint("0::0", 80, "/", "m").url == "http://[::1]:80"
    assert Endpoint("fd00::2", 80, "/", "m").url == "http://[fd00::2]:80"


def test_without_a_host_the_endpoint_is_rays_default(tmp_path: Path) -> None:
    """The server would listen on all addresses, and the launcher would check 127.0.0.1 only."""
    document = yaml.safe_load(SHIPPED.read_text())
    del document["http_options"]["host"]
    assert check_config(_write(tmp_path, document)).host == HTTPOptionsSchema().host == "0.0.0.0"
    del document["http_options"]
    assert (endpoint := check_config(_write(tmp_path, document))).host == "0.0.0.0"
    assert endpoint.port == 8000


@pytest.mark.parametrize("web", [True, False])
def test_the_launcher_reads_whether_there_is_a_page(tmp_path: Path, web: bool) -> None:
    document = yaml.safe_load(SHIPPED.read_text())
    assert check_config(SHIPPED).has_page
    document["applications"][0]["args"]["web"] = web
    assert check_config(_write(tmp_path, document)).has_page == web
