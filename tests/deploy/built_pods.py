"""Containers of the manifests as processes in the roots of built images, by Linux's own means: no container runtime.

Each gets what the kubelet would give it: namespaces of mounts, processes and the host's name, a root that cannot be
written to, a /tmp, the pod's volumes, the user, no capabilities, the image's environment and the manifest's. All pods
share one network namespace, apart from the machine's, whose one address is every pod's: their ports differ.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.pods import POD_IP, Container

MOUNT = """
mount --bind "$ROOT" "$ROOT"
cd "$ROOT"
for each in $VOLUMES; do mount --bind "${each%%:*}" "$ROOT${each#*:}"; mount -o remount,bind,ro "$ROOT${each#*:}"; done
mount -o remount,bind,ro "$ROOT"
mount -t proc proc proc
mount -t tmpfs -o mode=1777,size="$TMP_SIZE" tmp tmp
mount -t tmpfs -o mode=755 dev dev
for each in null zero full random urandom; do : > dev/$each; mount --bind /dev/$each dev/$each; done
mkdir -m 1777 dev/shm
hostname "$HOST"
exec setpriv --no-new-privs --bounding-set=-all,+sys_chroot,+setuid,+setgid \\
    chroot --userspec="$USER_ID" --groups= . /usr/bin/env -i -C "$FOLDER" "$@"
"""


@dataclass(frozen=True, slots=True)
class Image:
    """A built image: its root, made for this test, and what it says of how to start it."""

    root: Path
    config: Mapping[str, Any]


@dataclass(slots=True)
class Network:
    """A network namespace with the pods' address on its loopback device, held open by a process that sleeps."""

    holder: subprocess.Popen[bytes]
    enter: tuple[str, ...] = field(init=False)
    """In front of a command that runs in it."""

    def __post_init__(self) -> None:
        self.enter = ("nsenter", f"--net=/proc/{self.holder.pid}/ns/net")

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Network]:
        """Until the block ends."""
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-euc", f"ip link set lo up; ip address add {POD_IP}/32 dev lo; echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline()
            yield cls(holder)
        finally:
            holder.communicate()


def open_pod(image: Image, pod: Container, volumes: Mapping[str, Path], network: Network) -> subprocess.Popen[str]:
    """Starts the pod's only container. `volumes`: what the pod's volumes hold here, by name.

    Signals go to `process_of` it: what is returned is the parent of a process namespace.
    """
    mounts = {each["mountPath"]: each["name"] for each in pod.spec["volumeMounts"]}
    names = {volume["name"]: volume for volume in pod.pod["volumes"]}
    host = f"{pod.workload['metadata']['name']}-0123456789-abcde"
    hosts = volumes["tls"].parent / f"hosts-{pod.name}"
    hosts.write_text(f"127.0.0.1 localhost\n{POD_IP} {host}\n{POD_IP} tandem-router-headless\n")
    bound = {path: volumes[name] for path, name in mounts.items() if path != "/tmp"} | {"/etc/hosts": hosts}
    for path, source in bound.items():
        target = image.root / path.removeprefix("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir(exist_ok=True) if source.is_dir() else target.touch()
    security = pod.pod["securityContext"]
    size = names["tmp"]["emptyDir"]["sizeLimit"].replace("Mi", "M").replace("Gi", "G")
    settings = {
        "ROOT": str(image.root),
        "VOLUMES": " ".join(f"{source}:{path}" for path, source in bound.items()),
        "TMP_SIZE": size,
        "HOST": host,
        "USER_ID": f"{security['runAsUser']}:{security['runAsGroup']}",
        "FOLDER": image.config["WorkingDir"],
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    }
    environment = [*image.config["Env"], *(f"{name}={value}" for name, value in pod.environment().items())]
    unshare = ["unshare", "--mount", "--uts", "--pid", "--ipc", "--fork", "--kill-child", "sh", "-euc", MOUNT, "sh"]
    return subprocess.Popen(
        [*network.enter, *unshare, *environment, *image.config["Entrypoint"], *pod.arguments()],
        env=settings,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=1,
    )


def process_of(pod: subprocess.Popen[str]) -> int:
    """Returns the id of the container's first process, as the machine knows it."""
    (child,) = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
    return int(child)


def image_of(podman: Sequence[str], name: str, container: str) -> Image:
    """Makes a container of an image, which is never started: its root takes the mount points, as a runtime's would."""

    def call(*arguments: str) -> str:
        return subprocess.run([*podman, *arguments], check=True, text=True, stdout=subprocess.PIPE).stdout.strip()

    call("create", "--replace", "--name", container, name)
    (inspected,) = json.loads(call("image", "inspect", name))
    return Image(Path(call("mount", container)), inspected["Config"])
