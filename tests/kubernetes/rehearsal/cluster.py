"""A cluster of rendered objects without Kubernetes."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer_client.testing.guardian import Guardian

from ..network import Place, allowed_one_way
from ..rendering import Object, pod_of_train_job
from .container import empty_volume, make_image, make_secrets, secret_volume
from .pod import NAMESPACE, Pod
from .wires import NODE, UNUSED, Wires

WAIT_SECONDS = 180.0


class Cluster:
    """The pods of these objects, started at once and ended with the `with` block."""

    def __init__(self, objects: list[Object], folder: Path) -> None:
        self.objects = objects
        self.secrets = make_secrets(objects)
        self.lines: list[tuple[str, str]] = []
        self.pods: dict[str, Pod] = {}
        self._changed = threading.Condition()
        self._rewiring = threading.Lock()
        self.guardian = Guardian()
        self.wires = Wires()
        folder.mkdir()
        self.folder, self.hosts, self.image = folder, folder / "hosts", folder / "image"
        self.hosts.write_text("127.0.0.1 localhost\n")
        folder.chmod(0o755)
        make_image(self.image)

    def __enter__(self) -> Cluster:
        try:
            for name, index, template in self._wanted():
                self.pods[name] = Pod(self, name, index, template, self._mount(name, template))
            self._rewire()
            for pod in self.pods.values():
                pod.run()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for pod in self.pods.values():
            pod.close()
        self.wires.close()
        self.guardian.close()

    def remove(self, name: str) -> Pod:
        """Kill a pod as if its machine had failed."""
        with self._rewiring:
            pod = self.pods.pop(name)
        pod.kill()
        return pod

    def replace(self, name: str) -> Pod:
        """Replace a pod whose machine failed by one with the same name and volumes, and another address."""
        return self.start_again(name, self.remove(name))

    def start_again(self, name: str, old: Pod) -> Pod:
        """Start a pod with the name and volumes of one that was removed, and another address."""
        shutil.rmtree(self.folder / name / "tmp")  # an emptyDir goes with its pod
        index = int(name.rpartition("-")[2])
        new = self.pods[name] = Pod(self, name, index, old.template, old.mounts)
        empty_volume(self.folder / name / "tmp")
        self._rewire()
        new.run()
        return new

    def wait_for(self, pattern: str, number: int = 1) -> list[tuple[str, str]]:
        """Wait for so many matching lines, and return them with the names of their pods."""
        found: list[tuple[str, str]] = []

        def are_there() -> bool:
            found[:] = [(name, line) for name, line in self.lines if re.search(pattern, line)]
            return len(found) >= number

        self._wait_until(are_there)
        return found

    def wait_until_ready(self) -> None:
        """Wait until every pod is ready or has succeeded."""
        self._wait_until(lambda: all(pod.is_ready for pod in self.pods.values()))

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        """Raise AssertionError with the output after the time, or if a pod fails."""
        until = time.monotonic() + WAIT_SECONDS
        with self._changed:
            while not is_so():
                assert time.monotonic() < until, self.describe()
                for pod in self.pods.values():
                    assert pod.process.is_running or pod.process.exit_code == 0, self.describe()
                self._changed.wait(1)  # the end of a pod does not notify

    def describe(self) -> str:
        """Return pods and output for a failure."""
        return "\n".join([*map(repr, self.pods.values()), *(f"[{name}] {line}" for name, line in self.lines[-200:])])

    def on_line(self, name: str, line: str) -> None:
        with self._changed:
            self.lines.append((name, line))
            self._changed.notify_all()

    def _wanted(self) -> Iterator[tuple[str, int, Object]]:
        """Yield name, index and template of all pods, the coordinator last, as the order must not matter."""
        for one in sorted(self.objects, key=lambda one: one["kind"], reverse=True):
            name, spec = one["metadata"]["name"], one.get("spec", {})
            if one["kind"] == "TrainJob":
                [runtime] = [other for other in self.objects if other["kind"] == "TrainingRuntime"]
                name, number, template = f"{name}-node-0", spec["trainer"]["numNodes"], pod_of_train_job(one, runtime)
            elif one["kind"] in ("Deployment", "StatefulSet", "Job"):
                number, template = spec.get("replicas", spec.get("completions")), spec["template"]
            else:
                continue
            for index in range(number):
                yield f"{name}-{index}", index, template

    def _mount(self, name: str, template: Object) -> dict[str, Path]:
        """Return the folder at each path."""
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        [container] = template["spec"]["containers"]
        folders = {}
        for mount in container["volumeMounts"]:
            folder = self.folder / name / mount["name"]
            volume: dict[str, Any] = volumes.get(mount["name"], {})
            secret = volume.get("secret")
            folders[mount["mountPath"]] = (
                secret_volume(folder, secret, self.secrets[secret["secretName"]]) if secret else empty_volume(folder)
            )
        return folders

    # ------------------------------------------------------------------ the network

    def on_ready(self) -> None:
        self._rewire()
        with self._changed:
            self._changed.notify_all()

    def _rewire(self) -> None:
        """Update names and network rules for the current pods."""
        with self._rewiring:
            self._write_hosts()
            all_pods = [(pod.network, pod.address, pod.place) for pod in self.pods.values()]
            for network, address, place in all_pods:
                others = [(where, other) for _, where, other in all_pods if where != address]
                network.nft(self._rules(place, others))

    def _write_hosts(self) -> None:
        """Write the names that CoreDNS would resolve, with the namespace's search path."""
        lines = ["127.0.0.1 localhost"]
        for one in self.objects:
            if one["kind"] != "Service":
                continue
            service, spec = one["metadata"]["name"], one["spec"]
            behind = [pod for pod in self.pods.values() if spec["selector"].items() <= pod.place.labels.items()]
            published = [pod for pod in behind if pod.is_ready or spec.get("publishNotReadyAddresses")]
            if spec.get("clusterIP") == "None":
                lines += [f"{pod.address} {_long_names(f'{pod.name}.{service}')}" for pod in published]
            else:
                lines.append(f"{published[0].address if published else UNUSED} {_long_names(service)}")
        with self.hosts.open("r+") as file:  # in place, as it is mounted, and never empty
            file.write("".join(f"{line}\n" for line in lines))
            file.truncate()

    def _rules(self, own: Place, others: list[tuple[str, Place]]) -> str:
        policies = [one for one in self.objects if one["kind"] == "NetworkPolicy"]
        chains = []
        for hook, side, direction in (("input", "saddr", "Ingress"), ("output", "daddr", "Egress")):
            # A pod without a policy in this direction may connect to any address.
            is_open = not any(
                one["metadata"]["namespace"] == own.namespace and direction in one["spec"]["policyTypes"]
                for one in policies
            )
            rules = [
                f"ip {side} {address} {protocol.lower()} dport {port} accept"
                for address, peer in others
                for protocol, port in sorted(allowed_one_way(policies, direction, own, peer))
            ]
            if direction == "Ingress":
                rules.append(f"ip saddr {NODE} accept")  # the kubelet
            rules = ["meta oif lo accept" if hook == "output" else "meta iif lo accept", *rules]
            chains.append(
                f"chain {hook} {{ type filter hook {hook} priority 0; policy {'accept' if is_open else 'drop'};\n"
                "ct state established,related accept\n" + "\n".join(rules) + "\n}"
            )
        return (
            "add table inet policies\ndelete table inet policies\ntable inet policies {\n" + "\n".join(chains) + "\n}\n"
        )


def _long_names(name: str) -> str:
    return " ".join(
        f"{name}{suffix}" for suffix in ("", f".{NAMESPACE}", f".{NAMESPACE}.svc", f".{NAMESPACE}.svc.cluster.local")
    )
