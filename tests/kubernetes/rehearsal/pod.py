"""One pod: its process, and the kubelet's probes."""

from __future__ import annotations

import http.client
import ssl
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

from trainer_client.testing.guardian import Guardian
from trainer_client.testing.processes import Child

from ..network import Place, place_of
from ..rendering import Object, environment
from .container import ENVIRON, command_beside, command_in
from .wires import Wires

NAMESPACE = "gradpost"


@dataclass(frozen=True)
class Machine:
    """The shared parts of all pods."""

    wires: Wires
    image: Path
    hosts: Path
    folder: Path
    guardian: Guardian
    on_line: Callable[[str, str], None]
    on_ready: Callable[[], None]


class Pod:
    """A pod with a new address."""

    def __init__(
        self,
        name: str,
        index: int,
        template: Object,
        objects: list[Object],
        mounts: Mapping[str, Path],
        machine: Machine,
    ) -> None:
        self.name, self.template, self.mounts = name, template, mounts
        self.role = template["metadata"]["labels"]["app.kubernetes.io/component"]
        self._machine = machine
        self.network, self.address = machine.wires.plug()
        [self._container] = template["spec"]["containers"]
        fields = {
            "metadata.name": name,
            "metadata.namespace": NAMESPACE,
            "metadata.labels['apps.kubernetes.io/pod-index']": str(index),
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
            "status.podIP": self.address,
        }
        self._environ = {**ENVIRON, **environment(objects, template, fields)}
        self.place: Place = place_of(template, NAMESPACE)
        self.is_ready = False
        self.failures: list[str] = []  # for which a kubelet would restart it
        self._ends = threading.Event()
        self._process: Child | None = None

    def __repr__(self) -> str:
        return f"<Pod {self.name} {self.address} {'ready' if self.is_ready else 'not ready'}>"

    def run(self) -> None:
        """Start the container, and the kubelet's watch over it."""
        root = self._machine.folder / f"root-{self.name}-{self.address}"
        root.mkdir()
        inside = command_in(root, self._machine.image, self.mounts, self._machine.hosts, self._container["args"])
        self._process = Child(
            self.name,
            [*self.network.prefix, *inside],
            env=self._environ,
            on_line=self._machine.on_line,
            guardian=self._machine.guardian,
        )
        self._kubelet = threading.Thread(target=self._watch, name=f"kubelet of {self.name}")
        self._kubelet.start()

    @property
    def process(self) -> Child:
        assert self._process is not None
        return self._process

    def kill(self) -> None:
        """Kill it as if its machine had failed."""
        self._machine.wires.unplug(self.network)
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
        """Startup until it succeeds, then the other two, each with its period."""
        self._machine.wires.node.enter()
        probes: dict[str, Any] = {
            name: self._container.get(f"{name}Probe") for name in ("startup", "liveness", "readiness")
        }
        if probes["startup"] is None:
            self.is_ready = True
            return
        tries = probes["startup"]["failureThreshold"]
        while (problem := self._probe(probes["startup"])) is not None:
            tries -= 1
            if tries == 0:
                self.failures.append(f"it did not start: {problem}")
            if self._ends.wait(probes["startup"]["periodSeconds"]):
                return
        live = threading.Thread(target=self._watch_life, args=[probes["liveness"]])
        live.start()
        while not self._ends.is_set():
            is_ready = self._probe(probes["readiness"]) is None
            if is_ready != self.is_ready and not self._ends.is_set():
                self.is_ready = is_ready
                self._machine.on_ready()
            self._ends.wait(probes["readiness"]["periodSeconds"])
        live.join()

    def _watch_life(self, probe: Object) -> None:
        self._machine.wires.node.enter()
        in_a_row = 0
        while not self._ends.is_set():
            problem = self._probe(probe)
            in_a_row = 0 if problem is None else in_a_row + 1
            if in_a_row == probe["failureThreshold"]:
                self.failures.append(f"it does not live: {problem}")
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
        connection: http.client.HTTPConnection
        if how.get("scheme", "HTTP") == "HTTPS":  # a kubelet verifies nothing and has no certificate
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(self.address, port, timeout=timeout, context=context)
        else:
            connection = http.client.HTTPConnection(self.address, port, timeout=timeout)
        try:
            connection.request("GET", how["path"])
            status = connection.getresponse().status
            return None if 200 <= status < 400 else f"{how['path']}: {status}"
        finally:
            connection.close()
