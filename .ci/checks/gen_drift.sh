#!/usr/bin/env bash
# The committed stubs are what the oldest supported grpcio-tools generates from protos/.
# PYTHON: interpreter; GEN: folder with grpcio-tools, as `make gen` uses it.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

PYTHONPATH=${GEN:-.venv/gen} "$python" -m grpc_tools.protoc -Iprotos \
    --python_out="$fresh" --pyi_out="$fresh" --grpc_python_out="$fresh" protos/tandem/v1/*.proto
touch "$fresh/tandem/v1/__init__.py"
if ! diff -ru --exclude=__pycache__ --exclude=__init__.py "$fresh/tandem/v1" tandem/v1; then
    echo "tandem/v1 is not what protos/ generates: run 'make gen' and commit the result" >&2
    exit 1
fi
