#!/usr/bin/env bash
# Generates every stub from protos/ into a folder: gen.sh FOLDER. `make gen` and gen_drift.sh both come here.
# PYTHON: interpreter; GEN: folder with grpcio-tools.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1

PYTHONPATH=${GEN:-.venv/gen} "${PYTHON:-.venv/bin/python}" -m grpc_tools.protoc -Iprotos \
    --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" protos/tandem/v1/*.proto protos/tandem/foreign/*.proto
# Foreign protocols go into a descriptor pool of their own: tandem/foreign/pool.py says why.
sed -i 's/^from google.protobuf import descriptor_pool as _descriptor_pool$/from tandem.foreign import pool as _descriptor_pool/' \
    "$out"/tandem/foreign/*_pb2.py
