#!/usr/bin/env bash
# What goes to PyPI, into dist/: both distributions as sources and as wheels, of tandem-serving one wheel per
# architecture with the kernels of every tier. $1: folder of the programs of an environment with the tools.
#
# Zig compiles for arm64, links both against an old glibc, and links in what C++ needs at run time, which stays private:
# torch brings a libstdc++ of its own into the same process. GCC compiles for x86-64: with Clang attention was 1.6 to 4
# times slower.
set -euo pipefail
cd "$(dirname "$0")/.."
dist=$PWD/dist tree=$PWD/build/wheels/tree folder=$PWD/build/wheels
export PATH=$folder/bin:$(cd "$1" && pwd):$PATH
rm -rf "$dist" "$folder"
mkdir -p "$tree" "$folder/bin"
git ls-files -z | xargs -0 cp --parents --no-dereference --preserve=timestamps -t "$tree" # in it nothing was built before
export SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
cd "$tree"

logged() { "$@" >> "$folder/log" 2>&1 || { tail -n 30 "$folder/log" >&2; exit 1; }; }
logged python -m build --no-isolation --outdir "$dist" deploy/client
logged python -m build --no-isolation --sdist --outdir "$dist" .
echo '{ global: tandem_*; local: *; };' > "$folder/exports"
for machine in aarch64 x86_64; do
    gcc= target="$machine-linux-gnu.2.17 -s -Wl,--version-script=$folder/exports"
    [ $machine != x86_64 ] || gcc='case " $* " in *" -c "*) exec x86_64-linux-gnu-g++ "$@";; esac'
    printf '#!/bin/sh\n%s\nexec python -m ziglang c++ -target %s "$@"\n' "$gcc" "$target" > "$folder/bin/g++"
    chmod +x "$folder/bin/g++" # the first compiler that the build looks for
    export _PYTHON_HOST_PLATFORM=linux-$machine
    python -m kernels.cpu.build --all
    logged python -m build --no-isolation --wheel --outdir "$folder" .
    unset _PYTHON_HOST_PLATFORM
    logged python -m auditwheel repair --only-plat --wheel-dir "$dist" "$folder"/*_"$machine".whl
done
python -m twine check --strict "$dist"/*
ls -l "$dist"
