#!/usr/bin/env bash
# The native kernels on an arm64 processor that QEMU imitates: builds them, runs their tests in every tier it has.
#
# Half an hour on Debian 12 with `qemu-user` and arm64 among dpkg's architectures. Zig compiles, as for wheels. Arguments go
# to pytest; without any, all of tests/kernels that is about the native kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/build/arm64 root=$PWD/build/arm64/root site=$PWD/build/arm64/site

if [ ! -e "$folder/.complete" ]; then
    mkdir -p "$folder/debs" "$root" "$site"
    libraries=(libc6 libstdc++6 libgcc-s1 libgomp1 libatomic1 zlib1g libffi8 libssl3 libexpat1 libbz2-1.0 liblzma5 libuuid1
        libsqlite3-0 libcrypt1)
    python=(python3.11-minimal libpython3.11-minimal libpython3.11-stdlib)
    (cd "$folder/debs" && apt-get download "${libraries[@]/%/:arm64}" "${python[@]/%/:arm64}")
    for package in "$folder"/debs/*.deb; do dpkg -x "$package" "$root"; done
    # The newest torch for arm64 without CUDA.
    pip install -q --target "$site" --python-version 3.11 --only-binary=:all: --no-deps \
        --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 \
        torch==2.9.1 numpy typing_extensions sympy mpmath filelock jinja2 markupsafe networkx fsspec setuptools \
        pytest pytest-asyncio pytest-timeout pluggy iniconfig packaging pygments hypothesis sortedcontainers attrs \
        xxhash safetensors grpcio protobuf opentelemetry-api
    touch "$folder/.complete"
fi

# In a copy: the library and its objects lie beside the sources, where this machine's own are.
mkdir -p "$folder/tree"
git ls-files -z | xargs -0 cp --parents --preserve=timestamps -t "$folder/tree"
cd "$folder/tree"
printf '#!/bin/sh\nexec python -m ziglang c++ -target aarch64-linux-gnu.2.17 "$@"\n' > "$folder/g++" # the first that the build looks for
chmod +x "$folder/g++"
_PYTHON_HOST_PLATFORM=linux-aarch64 PATH=$folder:$PATH python -m kernels.cpu.build --all
emulated() { PYTHONPATH=$PWD:$site qemu-aarch64 -L "$root" "$root/usr/bin/python3.11" "$@"; }
# QEMU itself fails where a process with threads forks.
[ $# -gt 0 ] || set -- tests/kernels/test_cpu_*.py --deselect \
    tests/kernels/test_cpu_team.py::test_a_child_of_fork_opens_a_team_of_its_own
REQUIRE_PROGRAMS=1 emulated -m pytest -p no:cacheprovider --timeout 0 "$@"
