"""Containers as the kubelet would start them: environment, arguments, and the config that Tandem reads there."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from shell.config import DecodeConfig, ElasticConfig, PrefillConfig, RouterConfig, ServeConfig, add_arguments, load
from tests.deploy.manifests import Manifest, named, of_kind, pod_labels

Config = RouterConfig | PrefillConfig | DecodeConfig
COMMANDS: dict[str, type[Config | ServeConfig]] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "worker": ElasticConfig,
    "serve": ServeConfig,
}
POD_IP = "10.1.2.3"

_UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True, slots=True)
class Container:
    """One container, within its workload and among all manifests."""

    workload: Manifest
    spec: dict[str, Any]
    manifests: tuple[Manifest, ...]

    @property
    def name(self) -> str:
        """The container's."""
        return str(self.spec["name"])

    @property
    def pod(self) -> dict[str, Any]:
        """The pod's spec."""
        return dict(self.workload["spec"]["template"]["spec"])

    @property
    def labels(self) -> dict[str, str]:
        """The pod's labels."""
        return pod_labels(self.workload)

    @property
    def ports(self) -> dict[str, int]:
        """Numbers by name."""
        return {port["name"]: port["containerPort"] for port in self.spec["ports"]}

    @property
    def probes(self) -> dict[str, dict[str, Any]]:
        """By kind: startupProbe, readinessProbe, livenessProbe."""
        return {key: probe for key, probe in self.spec.items() if key.endswith("Probe")}

    @property
    def pre_stop_s(self) -> int:
        """Seconds between the order to stop and SIGTERM."""
        hook = self.spec.get("lifecycle", {}).get("preStop", {})
        return int(hook.get("sleep", {}).get("seconds", 0))

    def environment(self) -> dict[str, str]:
        """As the kubelet makes it; what is in files is not looked at."""
        variables = self._service_links() if self.pod.get("enableServiceLinks", True) else {}
        for source in self.spec.get("envFrom", []):
            variables |= named(self.manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
        for entry in self.spec.get("env", []):
            variables[entry["name"]] = self._value(entry)
        return variables

    def arguments(self) -> list[str]:
        """With variables filled in."""
        variables = self.environment()
        return [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], each) for each in self.spec["args"]]

    def config(self) -> Config:
        """What the process reads that answers at the ports. Raises ConfigError; SystemExit for an unknown argument."""
        whole = self._whole_config()
        return whole.router if isinstance(whole, ServeConfig) else whole

    def server(self) -> ServeConfig | None:
        """What `tandem serve` reads, if the container is a whole server. Raises as `config`."""
        whole = self._whole_config()
        return whole if isinstance(whole, ServeConfig) else None

    def configs(self) -> tuple[Config, ...]:
        """What each kind of process in it reads. Raises as `config`."""
        server = self.server()
        if server is None:
            return (self.config(),)
        workers = (replace(each, device=server.devices[0]) for each in (server.prefill_worker, server.decode_worker))
        return (server.router, *workers)

    def _whole_config(self) -> Config | ServeConfig:
        command, *arguments = self.arguments()
        config_class = COMMANDS[command]
        parser = argparse.ArgumentParser()
        add_arguments(parser, config_class)
        return load(config_class, parser.parse_args(arguments), self.environment())

    def _value(self, entry: dict[str, Any]) -> str:
        if "value" in entry:
            return str(entry["value"])
        source = entry["valueFrom"]
        if "resourceFieldRef" in source:
            kind, _, resource = source["resourceFieldRef"]["resource"].partition(".")
            return str(int(-(-quantity(self.spec["resources"][kind][resource]) // 1)))
        # The longest name that a pod of this workload can get: its own, a hash, five letters.
        pod_name = f"{self.workload['metadata']['name']}-0123456789-abcde"
        return {"status.podIP": POD_IP, "metadata.name": pod_name}[source["fieldRef"]["fieldPath"]]

    def _service_links(self) -> dict[str, str]:
        links = {}
        for service in of_kind(self.manifests, "Service"):
            if service["spec"].get("clusterIP") != "None":
                prefix = service["metadata"]["name"].upper().replace("-", "_")
                links[f"{prefix}_SERVICE_HOST"] = "10.96.0.1"
                links[f"{prefix}_PORT"] = f"tcp://10.96.0.1:{service['spec']['ports'][0]['port']}"
        return links


def containers(manifests: Iterable[Manifest]) -> Iterator[Container]:
    """Every container of every workload."""
    everything = tuple(manifests)
    for workload in of_kind(everything, "Deployment", "StatefulSet"):
        pod = workload["spec"]["template"]["spec"]
        assert "initContainers" not in pod  # tests of `router-files` look at the only one
        for spec in pod["containers"]:
            yield Container(workload, spec, everything)


def container(manifests: Iterable[Manifest], name: str) -> Container:
    """The one of this name."""
    (found,) = (each for each in containers(manifests) if each.name == name)
    return found


def quantity(text: str | int) -> float:
    """A Kubernetes quantity such as 500m or 2Gi."""
    found = re.fullmatch(r"([\d.]+)([a-zA-Z]*)", str(text))
    assert found is not None, text
    return float(found[1]) * _UNITS[found[2]]
