#!/usr/bin/env bash
# Tries a wheel as somebody who has nothing else: a new environment, the demo's answer, doctor, stop.
# From anywhere, without the checkout's code: .github/try_wheel.sh WHEEL [EXTRA]
# EXTRA is cpu or cuda on Linux, and nothing on macOS. PYTHON names the interpreter.
set -euo pipefail
wheel=$(cd "$(dirname "${1:?a wheel}")" && pwd)/$(basename "$1")
pins=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/constraints.txt
home=$(mktemp -d)
exo=$home/env/bin/exo-node node=
finish() {
  status=$?
  if [ -n "$node" ]; then "$exo" stop || kill "$node" || true; fi
  if [ "$status" != 0 ] && [ -f "$home/log" ]; then tail -n 40 "$home/log"; fi
  rm -rf "$home"
  exit "$status"
}
trap finish EXIT
cd "$home"  # so that nothing is imported from a checkout

"${PYTHON:-python3}" -m venv env
env/bin/python -m pip install --quiet --constraint "$pins" "$wheel${2:+[$2]}"
env/bin/python -m pip check
export EXO_DATA_DIR=$home/data EXO_PORT=${EXO_PORT:-21435} EXO_GRPC_PORT=${EXO_GRPC_PORT:-21436} EXO_MDNS=0
"$exo" --version
"$exo" start >log 2>&1 &
node=$!
for _ in $(seq 120); do
  curl --silent --fail --output /dev/null "http://127.0.0.1:$EXO_PORT/health/live" && break
  kill -0 "$node" || exit 1
  sleep 1
done
# Ports, memory and networks are the machine's; versions and backend are the wheel's.
("$exo" doctor || true) | tee doctor
if grep --quiet --extended-regexp '^WRONG +(versions|backend)' doctor; then exit 1; fi
answer=$("$exo" chat --model demo "Tell me a story.")
[ "${#answer}" -gt 100 ] || { echo "the demo's answer is too short: $answer"; exit 1; }
echo "$answer"
# What else has to be in the wheel: the page, its libraries, the cards.
curl --silent --fail --output page "http://127.0.0.1:$EXO_PORT/"
grep --quiet '<script' page
curl --silent --fail --output /dev/null "http://127.0.0.1:$EXO_PORT/static/vendor/htm-preact.module.js"
"$exo" models show Qwen/Qwen3.6-27B >card
grep --quiet "64 layers" card
"$exo" verify demo --quick
