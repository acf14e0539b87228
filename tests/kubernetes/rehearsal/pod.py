"""One pod: its process, and the kubelet's probes."""

from __future__ import annotations

import http.client
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING

from trainer_client.testing.processes import Child

from ..network import Place, place_of
from ..rendering import Object, environment
from .container import ENVIRON, command_beside, command_in

if TYPE_CHECKING:
    from .cluster import Cluster

NAMESPACE = "gradpost"


class Pod:
    """A pod with a new address."""

    def __init__(self, cluster: Cluster, name: str, index: int, template: Object, mounts: Mapping[str, Path]) -> None:
        self.name, self.template, self.mounts = name, template, mounts
        self.role = template["metadata"]["labels"]["app.kubernetes.io/component"]
        self._cluster = cluster
        self.network, self.address = cluster.wires.plug()
        [self._container] = template["spec"]["containers"]
        fields = {
            "metadata.name": name,
            "metadata.namespace": NAMESPACE,
            "metadata.labels['apps.kubernetes.io/pod-index']": str(index),
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
            "status.podIP": self.address,
        }
        self._environ = {**ENVIRON, **environment(cluster.objects, template, fields)}
        self.place: Place = place_of(template, NAMESPACE)
        self.is_ready = False
        self.failures: list[str] = []  # for which a kubelet would restart it
        self._ends = threading.Event()
        self._process: Child | None = None

    def __repr__(self) -> str:
        return f"<Pod {self.name} {self.address} {'ready' if self.is_ready else 'not ready'}>"

    def run(self) -> None:
        """Start the container, and the kubelet's watch over it."""
        root = self._cluster.folder / f"root-{self.name}-{self.address}"
        root.mkdir()
        inside = command_in(root, self._cluster.image, self.mounts, self._cluster.hosts, self._container["args"])
        self._process = Child(
            self.name,
            [*self.network.prefix, *inside],
            env=self._environ,
            on_line=self._cluster.on_line,
            guardian=self._cluster.guardian,
        )
        self._kubelet = threading.Thread(target=self._watch, name=f"kubelet of {self.name}")
        self._kubelet.start()

    @property
    def process(self) -> Child:
        assert self._process is not None
        return self._process

    def kill(self) -> None:
        """Kill it as if its machine had failed."""
        self._cluster.wires.unplug(self.network)
        self.process.signal(SIGKILL)
        self.close()

    def stop(self) -> int:
        """Stop it as a kubelet does, and return the exit code."""
        self._ends.set()
        code = self.process.stop(self.template["spec"]["terminationGracePeriodSeconds"])
        self.close()
        return code

    def close(self) -> None:
        self._ends.set()
        if self._process is not None:
            self._process.signal(SIGKILL)
            self._process.wait()
            self._kubelet.join()
        self.network.close()

    # ------------------------------------------------------------------ the kubelet

    def _watch(self) -> None:
        """Probe startup until it succeeds, then liveness and readiness."""
        self._cluster.wires.node.enter()
        if "startupProbe" in self._container:
            if not any(self._repeat("startup")):
                return
            live = threading.Thread(target=self._watch_life)
            live.start()
            for is_ready in self._repeat("readiness"):
                if is_ready != self.is_ready and not self._ends.is_set():
                    self.is_ready = is_ready
                    self._cluster.on_ready()
            live.join()
        else:
            self.is_ready = True

    def _watch_life(self) -> None:
        self._cluster.wires.node.enter()
        for _ in self._repeat("liveness"):
            pass

    def _repeat(self, name: str) -> Iterator[bool]:
        """Yield the success of each probe until the pod ends. Record a restart after too many failures in a row."""
        probe, in_a_row = self._container[f"{name}Probe"], 0
        while not self._ends.is_set():
            problem = self._probe(probe)
            in_a_row = 0 if problem is None else in_a_row + 1
            if in_a_row == probe.get("failureThreshold"):
                self.failures.append(f"{name}: {problem}")
            yield problem is None
            self._ends.wait(probe["periodSeconds"])

    def _probe(self, probe: Object) -> str | None:
        """Return None, or the reason of a failure."""
        try:
            if "exec" in probe:
                command = command_beside(self.process.pid, probe["exec"]["command"])
                subprocess.run(
                    command, env=self._environ, capture_output=True, check=True, timeout=probe["timeoutSeconds"]
                )
                return None
            return self._get(probe["httpGet"], probe["timeoutSeconds"])
        except (OSError, http.client.HTTPException, subprocess.SubprocessError) as error:
            return repr(error)

    def _get(self, how: Object, timeout: float) -> str | None:
        _, port = self.place.ports[how["port"]]
        connection = http.client.HTTPConnection(self.address, port, timeout=timeout)
        try:
            connection.request("GET", how["path"])
            status = connection.getresponse().status
            return None if 200 <= status < 400 else f"{how['path']}: {status}"
        finally:
            connection.close()
