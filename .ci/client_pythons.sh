#!/usr/bin/env bash
# tandem-serving-client on every Python that it is for and that is in PATH, with the newest grpcio and protobuf that pip
# finds for it: installs it into an environment of its own, imports all of it, calls a server.
set -euo pipefail
cd "$(dirname "$0")/.."
server=$1 # folder of the programs of an environment with tandem-serving
folder=$(mktemp -d)
trap 'kill $serving 2> /dev/null || true; rm -rf "$folder"' EXIT

cat > "$folder/call.py" << 'END'
import importlib, pkgutil, sys
import google.protobuf, grpc, tandem
from tandem.client import Client
for module in pkgutil.walk_packages(tandem.__path__, "tandem."):
    importlib.import_module(module.name)
with Client(sys.argv[1]) as client:
    client.wait_ready(timeout_s=60)
    assert len(client.complete("Once", max_tokens=4, ignore_eos=True).choices[0].token_ids) == 4
    assert sum(len(update.token_ids) for update in client.generate("Once", max_tokens=3, ignore_eos=True)) == 3
print(f"Python {sys.version.split()[0]}: grpcio {grpc.__version__}, protobuf {google.protobuf.__version__}")
END

"$server/tandem" serve --model demo --listen 127.0.0.1:0 > "$folder/address" 2> "$folder/log" &
serving=$!
"$server/python" -m pip wheel -q --disable-pip-version-check --no-deps --wheel-dir "$folder" deploy/client
until grep -q ready "$folder/address"; do kill -0 $serving || { cat "$folder/log"; exit 1; }; sleep 0.2; done
for minor in 10 11 12 13 14; do
    python=python3.$minor
    "$python" -c '' 2> /dev/null || { echo "Python 3.$minor: not in PATH"; continue; }
    "$python" -m venv "$folder/$minor"
    "$folder/$minor/bin/pip" install -q --disable-pip-version-check "$folder"/*.whl
    (cd "$folder" && "$folder/$minor/bin/python" call.py "$(cut -d' ' -f2 address)")
done
