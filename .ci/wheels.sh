#!/usr/bin/env bash
# What goes to PyPI, into dist/: both distributions as sources and as wheels, of tandem-serving one wheel per
# architecture with the kernels of every tier. $1: folder of the programs of an environment with the tools.
#
# Zig's clang compiles for any architecture and against an old glibc, so that every Linux builds the same wheels. What
# C++ needs at run time is linked in and stays private: torch brings a libstdc++ of its own into the same process.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(cd "$1" && pwd)/python dist=$PWD/dist tree=$PWD/build/wheels/tree folder=$PWD/build/wheels
rm -rf "$dist" "$folder"
mkdir -p "$tree" "$folder/bin"
git ls-files -z | xargs -0 cp --parents --no-dereference --preserve=timestamps -t "$tree" # in it nothing was built before
export SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
cd "$tree"

"$python" -m build --no-isolation --outdir "$dist" deploy/client > "$folder/log"
"$python" -m build --no-isolation --sdist --outdir "$dist" . >> "$folder/log"
echo '{ global: tandem_*; local: *; };' > "$folder/exports"
for machine in aarch64 x86_64; do
    target="$machine-linux-gnu.2.17 -s -Wl,--version-script=$folder/exports"
    printf '#!/bin/sh\nexec "%s" -m ziglang c++ -target %s "$@"\n' "$python" "$target" > "$folder/bin/g++"
    chmod +x "$folder/bin/g++" # the first compiler that the build looks for
    export _PYTHON_HOST_PLATFORM=linux-$machine
    PATH=$folder/bin:$PATH "$python" -m kernels.cpu.build --all
    "$python" -m build --no-isolation --wheel --outdir "$folder" . >> "$folder/log"
    unset _PYTHON_HOST_PLATFORM
    "$python" -m auditwheel repair --only-plat --wheel-dir "$dist" "$folder"/*_"$machine".whl >> "$folder/log"
done
"$python" -m twine check --strict "$dist"/*
ls -l "$dist"
