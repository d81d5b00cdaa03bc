"""Checks of a Serve config file, made before Ray is started.

Serve silently accepts unknown keys at every level; these checks reject them and suggest the nearest known key.
"""

from __future__ import annotations

import errno
import os
import reprlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    LoggingConfig,
    ServeApplicationSchema,
    ServeDeploySchema,
    gRPCOptionsSchema,
)

from deployments.config import AppConfig, unknown_key_message
from deployments.launcher.direct import host_in_url
from deployments.proxy.limits import ProxyLimits
from deployments.proxy.listeners import is_all_of_ipv6
from engine.errors import ConfigError, ModelLoadError

__all__ = ["Endpoint", "check_config", "check_document", "read_document", "require_free_port"]

IMPORT_PATH = "deployments.app:build_app"
ITS_OWN = "give one of its addresses, 127.0.0.1, or 0.0.0.0 for all of them"
LOOPBACKS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1"}  # of hosts that are all addresses of IPv4


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address at which the server will listen, the limits for its clients, and the model it will serve."""

    host: str
    port: int
    prefix: str
    model: str
    has_page: bool = False
    limits: ProxyLimits = field(default_factory=ProxyLimits)
    task: str = "generate"

    @property
    def url(self) -> str:
        """The base URL for a client on this machine."""
        host = "::1" if is_all_of_ipv6(self.host) else LOOPBACKS.get(self.host, self.host)
        return f"http://{host_in_url(host)}:{self.port}{self.prefix.rstrip('/')}"


def check_config(path: Path) -> Endpoint:
    """Check a Serve config file down to the engine's options, and the model's config.json.

    Raises:
        ConfigError: one line that names the file, the first mistake and the remedy.
        ModelLoadError: likewise, of a mistake in the model's config.json.
    """
    document = read_document(path)
    try:
        return check_document(document)[0]
    except (ConfigError, ModelLoadError) as error:
        raise type(error)(f"{path}: {error}") from None


def check_document(document: dict[str, Any]) -> tuple[Endpoint, AppConfig]:
    """Check the content of a Serve config file; return where it listens, and the arguments of its application.

    Raises:
        ConfigError: one line that names the first mistake and the remedy.
        ModelLoadError: likewise, of a mistake in the model's config.json.
    """
    _check_keys(document, ServeDeploySchema, "the file")
    _check_keys(document.get("http_options") or {}, HTTPOptionsSchema, "http_options")
    _check_keys(document.get("grpc_options") or {}, gRPCOptionsSchema, "grpc_options")
    _check_keys(document.get("logging_config") or {}, LoggingConfig, "logging_config")
    http = _validate(document).http_options
    applications = document.get("applications") or []
    configs = [_check_application(application, index) for index, application in enumerate(applications)]
    ours = [(app, config) for app, config in zip(applications, configs, strict=True) if config is not None]
    if not ours:
        raise ConfigError(f"no application has import_path: {IMPORT_PATH}; serve_config.yaml shows one")
    application, config = ours[0]
    prefix = str(application.get("route_prefix") or "/")
    endpoint = Endpoint(
        http.host, http.port, prefix, config.served_name, config.has_page, config.limits.proxy, config.task
    )
    return endpoint, config


def _validate(document: dict[str, Any]) -> ServeDeploySchema:
    """Return the file with Ray's defaults.

    Check its values with Ray's schema, and those that Ray accepts although no server can use them.
    """
    try:
        schema = ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{where}={reprlib.repr(first['input'])}: {' '.join(first['msg'].split())}") from None
    if (seconds := schema.http_options.request_timeout_s) is not None:
        raise ConfigError(
            f"http_options.request_timeout_s={seconds} would cut answers without a reason; leave it out, and set "
            "args.limits.request_timeout_s"
        )
    port = schema.http_options.port
    if type(port) is not int or not 1 <= port <= 65535:
        raise ConfigError(f"http_options.port={port!r} is not a port; give a number from 1 to 65535")
    for application in schema.applications:
        if application.route_prefix is not None and not application.route_prefix.startswith("/"):
            raise ConfigError(f"route_prefix={application.route_prefix!r} must begin with '/'")
    return schema


def require_free_port(endpoint: Endpoint) -> None:
    """Raise ConfigError unless a server can listen at the endpoint: its host is this machine's and its port is free."""
    if "%" in endpoint.host:
        raise ConfigError(_of_an_interface(endpoint))
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((endpoint.host, endpoint.port))
            _require_route(probe)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
        raise ConfigError(_why_not(endpoint, error)) from None


def _require_route(bound: socket.socket) -> None:
    """Raise OSError if no client can connect to a bound socket: to an address of many machines, which can be bound."""
    with socket.socket(bound.family, socket.SOCK_STREAM) as client:
        client.setblocking(False)  # the system looks for a route at once
        error = client.connect_ex(bound.getsockname())
    if error == errno.ENETUNREACH:  # a multicast or a broadcast address
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


def _of_an_interface(endpoint: Endpoint) -> str:
    return f"http_options.host='{endpoint.host}' is of one interface only, on which HAProxy cannot listen; {ITS_OWN}"


def _why_not(endpoint: Endpoint, error: OSError | UnicodeError) -> str:
    """Return why a server cannot listen at the endpoint, and the remedy."""
    host, port = endpoint.host, endpoint.port
    if isinstance(error, socket.gaierror | UnicodeError):
        return f"http_options.host='{host}' cannot be resolved to an address of this machine; {ITS_OWN}"
    if error.errno == errno.EINVAL:  # an address of IPv6 that is valid beside the name of an interface
        return _of_an_interface(endpoint)
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # the second: a machine without IPv6
        return f"http_options.host='{host}' is not an address of this machine; {ITS_OWN}"
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken; free it, or change http_options.port"
    return f"port {port} on {host} cannot be used ({error.strerror}); change http_options.port"


def read_document(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file; raises ConfigError if it cannot be read, or is not a mapping."""
    try:
        with path.open(encoding="utf-8") as file:  # its name is part of the errors
            document = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must be a mapping with 'applications'; serve_config.yaml shows one")
    return document


def _check_application(application: Any, index: int) -> AppConfig | None:
    """Check one application; return its arguments if it is a Pagoda application, else None."""
    where = f"applications[{index}]"
    _check_keys(application, ServeApplicationSchema, where)
    for number, deployment in enumerate(application.get("deployments") or []):
        _check_keys(deployment, DeploymentSchema, f"{where}.deployments[{number}]")
    if application.get("import_path") != IMPORT_PATH:
        return None
    config = AppConfig.parse(application.get("args") or {})
    config.require_model()
    return config


def _check_keys(section: Any, schema: type[BaseModel], where: str) -> None:
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where} must be a mapping of keys to values, not {type(section).__name__}")
    for key in section:
        if key not in schema.model_fields:
            raise ConfigError(unknown_key_message(str(key), list(schema.model_fields), where))
