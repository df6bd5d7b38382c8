#!/usr/bin/env bash
# Make a virtual environment with the locked development versions and this package in it. Only files whose hashes are locked are
# installed, but for another pylance:
#   setup_env.sh .venv requirements/dev.txt [latest, or another version of pylance than the locked one]
# PYTHON, from the environment: interpreters to try, or a version such as 3.13, which is looked for on PATH and in pyenv.
set -euo pipefail

venv=$1
lock=$2
pylance=${3:-}

fail() {
    printf 'install: %s\n' "$@" >&2
    exit 1
}

# The next Python is tried only where it is asked for.
most=14
if [ "${PYTHON:-}" = 3.14 ]; then most=15; fi

find_python() {
    local candidate
    for candidate in "$@"; do
        # A version manager's shim exists even where its Python does not: only one that runs counts.
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, '$most'))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

uv=$(command -v uv || true)

if [ ! -x "$venv/bin/python" ]; then
    if [[ ${PYTHON:-} =~ ^3\.[0-9.]+$ ]]; then
        versions=${PYENV_ROOT:-$HOME/.pyenv}/versions
        candidates=("python$PYTHON" "$versions/$PYTHON"/bin/python "$versions/$PYTHON".*/bin/python)
        where="python$PYTHON on PATH, and $versions"
        advice="Put python$PYTHON on PATH"
    else
        candidates=(${PYTHON:-python3.12 python3.11 python3.13 python3.10 python3})
        where=${PYTHON:-PATH}
        advice="Install one (Debian, Ubuntu: apt-get install python3 python3-venv), or name it: make install PYTHON=/path/to/python3"
    fi
    if python=$(find_python "${candidates[@]}"); then
        python=$("$python" -c 'import sys; print(sys.executable)')
    elif [ -n "$uv" ] && [ -z "${PYTHON:-}" ]; then
        python=3.12 # uv fetches it
    else
        fail "no Python 3.10 to 3.13 found (looked at: $where)." "$advice, or install it with pyenv."
    fi
    echo "install: making $venv with $python"
    if [ -n "$uv" ]; then
        "$uv" venv --quiet --python "$python" "$venv"
    elif ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        fail "$python comes without the venv module or its pip." \
            "Install it (Debian, Ubuntu: apt-get install python$version-venv), or install uv and try again."
    else
        "$python" -m venv "$venv"
    fi
fi

with_pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
if [ -z "$uv" ]; then
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
        fail "$venv has no pip (uv made it) and uv is not on PATH any more. Remove $venv and run make install again."
    # pip alone takes minutes. uv shall use the index and the certificates that pip uses.
    echo "install: getting uv, which installs the rest many times faster than pip"
    index=$("$venv/bin/python" -m pip config get global.index-url 2>/dev/null || true)
    index=${PIP_INDEX_URL:-$index}
    export UV_NATIVE_TLS=${UV_NATIVE_TLS:-true} ${index:+UV_DEFAULT_INDEX="$index"}
    if with_pip --require-hashes -r requirements/uv.txt; then uv=$venv/bin/uv; fi
fi
echo "install: installing $lock (the first time some hundreds of MB are downloaded)"
quiet=--quiet
if [ -t 2 ]; then quiet=; fi # uv shows its progress on a terminal
install() {
    if [ -n "$uv" ] && "$uv" pip install $quiet --python "$venv/bin/python" "$@"; then return; fi
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || fail "uv failed, and $venv has no pip to try instead."
    [ -z "$uv" ] || echo "install: uv failed; trying pip, which takes minutes"
    with_pip "$@"
}
install --require-hashes -r "$lock"
case $pylance in
    '') ;;
    latest)
        install --upgrade --no-deps pylance # uv would upgrade all that it needs as well
        install pylance
        ;;
    *) install "pylance==$pylance" ;;
esac
install --no-deps --no-build-isolation -e .

"$venv/bin/airflow-geneva" doctor --path "$PWD"
