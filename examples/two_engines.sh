#!/usr/bin/env bash
# Two engines that share pages through Valkey, behind vLLM's router, on a machine with two GPUs.
#
#   pip install vllm-router==0.1.17     # in a separate environment, on PATH
#   examples/two_engines.sh MODEL
#
# Clients use http://127.0.0.1:8000 and send the header X-Session-ID. Without this header, the router
# sends all chat requests to one engine. Ctrl-C stops all processes. For engines on several machines,
# bind Valkey to an address that the engines can reach, and configure a user, a password and TLS
# (SECURITY.md).
set -euo pipefail
model="${1:?usage: examples/two_engines.sh MODEL}"
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT

valkey-server --bind 127.0.0.1 --port 6379 --save '' --appendonly no \
  --maxmemory 64gb --maxmemory-policy allkeys-lru &

export TIERED_KV_CPU_GIB=32
export TIERED_KV_REMOTE=valkey://127.0.0.1:6379
export VLLM_PLUGINS=tiered_kv

engine() { # GPU, port
  CUDA_VISIBLE_DEVICES="$1" vllm serve "$model" --host 127.0.0.1 --port "$2" \
    --shutdown-timeout 30 \
    --kv-transfer-config '{"kv_connector":"TieredContinuumConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute"}' \
    --scheduler-cls tiered_kv.connectors.vllm.engine_scheduler.ContinuumScheduler &
  engine_pid=$!
  until curl --fail --silent --output /dev/null "http://127.0.0.1:$2/health"; do
    kill -0 "$engine_pid" # ends the script if the engine has died
    sleep 1
  done
}
engine 0 8001
engine 1 8002

vllm-router --host 127.0.0.1 --port 8000 --policy consistent_hash \
  --health-check-interval-secs 1 --health-failure-threshold 2 \
  --worker-urls http://127.0.0.1:8001 http://127.0.0.1:8002
