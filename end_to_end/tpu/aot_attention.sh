#!/bin/bash
# Compiles every attention kernel for v6e, v5e, v5p and tpu7x at 720p, 1080p and 1440p, without a TPU, and prints one table
# of AOT estimates. Needs libtpu; most cases took 4 to 40 s on an idle core. What was compiled is kept in
# outputs/aot_estimates, and a second run goes on from there. Arguments narrow it: aot_attention.sh chips=v6e resolutions=720p (--help)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
[ -x $python ] || python=python3
exec $python -m MaxText.attention.aot_estimate "$@"
