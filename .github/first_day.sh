#!/usr/bin/env bash
# What an owner does on a machine's first day, with what it prints kept in a folder, one file a step:
# doctor, verify of three forms of the demo, a chat with drafts, and the demo over two nodes.
# From a checkout with its environment: .github/first_day.sh FOLDER
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?a folder for what is printed}
mkdir -p "$out/models" && out=$(cd "$out" && pwd)
exo=.venv/bin/exo-node demo=shard/models/demo
export EXO_CLUSTER_KEY=abcdefghijklmnopqrstuvwxyz234567 EXO_TIMING=local EXO_MDNS=0
failed=()

step() {  # NAME COMMAND…: runs it, prints and keeps its output
  local name=$1; shift
  echo "== $name: $*"
  "$@" 2>&1 | tee "$out/$name.txt"
  [ "${PIPESTATUS[0]}" = 0 ] || failed+=("$name")
}

node() {  # NAME PORT FLAGS…: starts a node and waits until it answers
  local name=$1 port=$2; shift 2
  "$exo" start --name "$name" --data-dir "$out/$name" --models-dir "$out/models" \
    --port "$port" --grpc-port "$((port + 1))" "$@" >"$out/$name.log" 2>&1 &
  for _ in $(seq 120); do
    curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health" && return
    sleep 1
  done
  return 1
}

"$exo" doctor >"$out/doctor.txt" 2>&1  # its warnings are for whoever reads the results
cat "$out/doctor.txt"
step verify "$exo" verify demo --report "$out/verify.json"
step convert "$exo" models convert "$demo" "$out/models/demo-4bit"
step verify-4bit "$exo" verify "$out/models/demo-4bit" --quick --report "$out/verify-4bit.json"
step convert-mxfp4 .venv/bin/python -m mlx_lm convert --hf-path "$demo" \
  --mlx-path "$out/models/demo-mxfp4" --quantize --q-mode mxfp4 --q-bits 4 --q-group-size 32
step verify-mxfp4 "$exo" verify "$out/models/demo-mxfp4" --quick --report "$out/verify-mxfp4.json"
step node-one node one 21415
step chat "$exo" chat --data-dir "$out/one" --model demo "Tell me a story."
step node-two node two 21425 --peer 127.0.0.1:21416
step split "$exo" models load demo --min-nodes 2 --data-dir "$out/one"
step chat-split "$exo" chat --data-dir "$out/one" --model demo "Tell me a story."
step status "$exo" status --data-dir "$out/one"
for name in two one; do "$exo" stop --data-dir "$out/$name"; done
rm -rf "$out/models"

if [ ${#failed[@]} != 0 ]; then echo "failed: ${failed[*]}"; exit 1; fi
