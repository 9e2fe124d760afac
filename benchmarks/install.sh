#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs other routers from PyPI, each in a virtual environment of its own: install.sh [FOLDER]
# What can't be had is named and left out. About 400 MB.
set -uo pipefail
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/caddy-kv-cache/routers}
python=${PYTHON:-python3}
mkdir -p "$folder"
for package in sglang-router==0.3.2 smg==1.13.0 vllm-router==0.1.17; do
  name=${package%%==*}
  if "$python" -m venv "$folder/$name" && "$folder/$name/bin/pip" install -q --disable-pip-version-check "$package"; then
    echo "$package is in $folder/$name"
  else
    echo "$package could not be installed and is left out" >&2
  fi
done
