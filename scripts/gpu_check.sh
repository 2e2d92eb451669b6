#!/usr/bin/env bash
# Proves camox_ops on the GPU of this machine, from a wheel carried here and without network; see docs/gpu.md.
#   scripts/gpu_check.sh [--quick|--full] [--parts a,b] [--ops a,b] [--missing] [--seconds N] [--wheel FILE] [--out DIR] [--copy DIR]
# --quick (default) takes at most 9.5 minutes. A run adds to the record of its commit and wheel; --missing: only what that lacks.
# PYTHON names the Python that has torch; CAMOX_COMMIT the commit where this tree came without its repository; --copy a folder
# for the record and an archive of the logs. --rehearse tries everything on the CPU instead; its record counts for nothing.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
mode=quick device=cuda out= wheel= copy=
passed_on=()
while [ $# -gt 0 ]; do
  case $1 in
    --quick) mode=quick ;;
    --full) mode=full ;;
    --rehearse) mode=rehearsal device=cpu ;;
    --out) out=$2 && shift ;;
    --wheel) wheel=$2 && shift ;;
    --tests) passed_on+=("$1" "$(realpath "$2")") && shift ;;
    --copy) copy=$2 && shift ;;
    --parts | --ops | --seconds) passed_on+=("$1" "$2") && shift ;;
    --missing) passed_on+=("$1") ;;
    *) sed -n '2,6p' "$0" >&2 && exit 2 ;;
  esac
  shift
done
if [ -z "$out" ]; then
  [ $device = cuda ] || { echo "gpu_check: --rehearse needs --out: its record is no result" >&2 && exit 2; }
  out=$root/benchmarks/results
  logs=$(mktemp -d)
else
  logs=$out
fi
mkdir -p "$out" ${copy:+"$copy"}
if [ -z "$wheel" ]; then
  for wheel in "$root"/dist/camox_ops-*.whl; do :; done
  [ -f "$wheel" ] || { echo "gpu_check: no wheel in $root/dist; name one with --wheel, or make one with: make wheel" >&2 && exit 2; }
fi
"$python" -c 'import torch' || { echo "gpu_check: $python has no torch; PYTHON=... names another" >&2 && exit 2; }

wheel=$(realpath "$wheel") out=$(realpath "$out") logs=$(realpath "$logs")
[ -z "$copy" ] || { copy=$(realpath "$copy") && passed_on+=(--copy "$copy"); }
# A folder of its own in front of everything: an installed camox_ops or the source tree are not what is tested.
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
echo "installing $(basename "$wheel")"
"$python" -m pip --disable-pip-version-check -q install --no-index --no-deps --no-compile --target "$site" "$wheel"
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TERM=dumb
# Host threads that wait by spinning would starve each other on a busy machine.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
cd "$site"
code=0
"$python" "$root/scripts/gpu_check.py" all --mode $mode --device $device --out "$out" --logs "$logs" --wheel "$wheel" \
  "${passed_on[@]}" || code=$?
[ -z "$copy" ] || tar -czf "$copy/gpu-check-logs.tar.gz" -C "$logs" parts
echo "logs: $logs/parts"
exit $code
