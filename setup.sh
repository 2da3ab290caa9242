#!/bin/sh
# Makes the environment .venv from requirements.txt and puts the plugins into it. Does nothing when that is done already.
set -eu
cd "$(dirname "$0")"
here=$(pwd -P)

fail() {
    echo "setup: $*" >&2
    exit 1
}

supported() {
    command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null
}

if [ -z "${PYTHON:-}" ]; then
    for candidate in python3.11 python3.12 python3; do
        if supported "$candidate"; then PYTHON=$candidate && break; fi
    done
fi
[ -n "${PYTHON:-}" ] || fail "Python 3.11 or 3.12 is needed and none is on PATH; name one: make setup PYTHON=/path/to/python3.11"
supported "$PYTHON" || fail "Python 3.11 or 3.12 is needed, and $PYTHON is not one; name another: make setup PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || fail "$PYTHON has no venv module (on Debian: apt-get install python3-venv)"

# The stamp says what was installed, from where and for which folder: a moved or outdated environment is made anew.
want=$( (echo "$here"; "$PYTHON" -c 'import sys; print(sys.version)'; cat requirements.txt requirements-fairseq.txt pyproject.toml setup.py plugins/sinkhorn_attention/engines/cpp/*) | cksum)
if [ "$(cat .venv/installed 2>/dev/null)" = "$want" ]; then exit 0; fi
free=$(df -Pk . | awk 'NR == 2 { print $4 }')
if [ ! -d .venv ] && [ "$free" -lt 8000000 ]; then
    fail "the environment takes about 7 GB and $here has $((free / 1000000)) GB free"
fi
if [ -d .venv ] && ! .venv/bin/python -m pip --version 2>/dev/null | grep -qF "$here/.venv"; then rm -rf .venv; fi
[ -d .venv ] || "$PYTHON" -m venv .venv || fail "$PYTHON could not make $here/.venv"

log=.venv/install.log
echo "setup: installing $(grep -c == requirements.txt) packages into .venv (about 7 GB, some minutes; log: $log)"
.venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt >"$log" 2>&1 &
pip=$!
trap 'kill "$pip" 2>/dev/null' INT TERM
while kill -0 "$pip" 2>/dev/null; do
    if [ -t 1 ]; then printf '\r\033[K%.100s' "$(tail -n 1 "$log" | tr -d '\r')"; fi
    sleep 1
done
if [ -t 1 ]; then printf '\r\033[K'; fi
if ! wait "$pip"; then
    if grep -qiE 'connection|name resolution|timed out|No matching distribution found for torch==|unreachable' "$log"; then
        fail "the package index cannot be reached; check the network (or pip's index-url) and run it again: what is downloaded is kept. Details: $log"
    fi
    fail "$(grep -E '^ERROR' "$log" | tail -n 1 || true) (details: $log)"
fi
# fairseq has wheels for this platform alone; elsewhere everything but the text experiments works.
if [ "$(uname -sm)" = "Linux x86_64" ]; then
    .venv/bin/python -m pip install --disable-pip-version-check --require-hashes --no-deps -r requirements-fairseq.txt >>"$log" 2>&1 ||
        fail "fairseq could not be installed: $(grep -E '^ERROR' "$log" | tail -n 1 || true) (details: $log)"
else
    echo "setup: no fairseq wheel for $(uname -sm); the text experiments are left out"
fi
.venv/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e . >>"$log" 2>&1 ||
    fail "the plugins could not be installed; details: $log"
if ! ls plugins/sinkhorn_attention/engines/libsinkhorn_*.so >/dev/null 2>&1; then
    echo "setup: no C++20 compiler (g++ 11 or newer), so attention on a CPU takes the portable engine, about twice as long"
fi
echo "$want" >.venv/installed
echo "setup: done"
