#!/usr/bin/env bash
# The committed stubs are what the oldest supported grpcio-tools generates from protos/.
# PYTHON: interpreter; GEN: folder with grpcio-tools, as `make gen` uses it.
set -euo pipefail
cd "$(dirname "$0")/../.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

bash .ci/gen.sh "$fresh"
for package in tandem/v1 tandem/foreign; do
    # Files that we write ourselves beside the stubs: __init__.py and pool.py.
    if ! diff -ru --exclude=__pycache__ --exclude=__init__.py --exclude=pool.py "$fresh/$package" "$package"; then
        echo "$package is not what protos/ generates: run 'make gen' and commit the result" >&2
        exit 1
    fi
done
