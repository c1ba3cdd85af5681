#!/bin/bash
# Compiles every attention kernel for v6e, v5e, v5p and tpu7x at 720p, 1080p and 1440p, without a TPU, and prints AOT
# estimates. Needs libtpu; about an hour on two cores. Arguments narrow it: aot_attention.sh chips=v6e resolutions=720p
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python3 -m MaxText.attention.aot_estimate "$@"
