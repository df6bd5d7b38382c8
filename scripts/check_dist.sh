#!/usr/bin/env bash
# Build the wheel and the sdist, check what PyPI checks, and run the demo from the wheel in an empty environment:
#   check_dist.sh PYTHON
# The constraints are the development versions with their hashes: what is tried is the wheel, not what else was released today.
set -euo pipefail

python=$1
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

rm -rf dist
"$python" -m build --no-isolation --outdir dist
"$python" -m twine check --strict dist/*

trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
"$python" -m venv "$trial/venv"
"$trial/venv/bin/python" -m pip install --quiet --require-hashes -r requirements/uv.txt
wheel=$(ls "$PWD"/dist/*.whl)
hash=$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$wheel")
printf '%s\n' "airflow-geneva[java,demo] @ file://$wheel --hash=sha256:$hash" >"$trial/wheel.txt"
"$trial/venv/bin/uv" pip install --quiet --python "$trial/venv/bin/python" --require-hashes \
    --constraint requirements/dev.txt -r "$trial/wheel.txt"
"$trial/venv/bin/uv" pip check --python "$trial/venv/bin/python"

# The examples travel in the sdist only.
cp -R dags_examples "$trial/dags_examples"
cd "$trial"
"$trial/venv/bin/airflow-geneva" doctor --path "$trial"
"$trial/venv/bin/python" -m dags_examples.demo
