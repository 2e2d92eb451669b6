# Sourced by run and nightly: stages that are timed, and a list of times at the end whatever happens.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export TERM=dumb PYTHONUNBUFFERED=1 CAMOX_CUDA_ARCHS=${CAMOX_CUDA_ARCHS:-sm_80} CAMOX_QUICK_BUILD=${CAMOX_QUICK_BUILD:-1}
times=""

stage() {
  local name=$1 begin=$SECONDS
  shift
  printf '\n== %s\n' "$name"
  if ! "$@"; then
    times+=$(printf '%6d s  %s: FAILED' $((SECONDS - begin)) "$name")$'\n'
    exit 1
  fi
  times+=$(printf '%6d s  %s' $((SECONDS - begin)) "$name")$'\n'
}

trap 'printf "\n== times\n%s%6d s  in all\n" "$times" "$SECONDS"' EXIT

# csrc/gemm has no op of its own; an op may have two of these files.
ops() { for bind in csrc/*/*_bind.cpp; do basename "$(dirname "$bind")"; done | grep -vx gemm | sort -u; }

break_every_op() {
  local op
  for op in $(ops) gemm tune; do make --no-print-directory break OP="$op" || return 1; done
}

# As a user installs it: into an environment of its own, found from another folder. That environment borrows the torch of .venv.
install_elsewhere() {
  local root=$PWD fresh=$PWD/build/fresh
  rm -rf "$fresh" && .venv/bin/python -m venv --without-pip "$fresh" || return 1
  local site='import sysconfig; print(sysconfig.get_path("purelib"))'
  .venv/bin/python -c "$site" >"$("$fresh/bin/python" -c "$site")/borrowed.pth" || return 1
  .venv/bin/python -m pip --python "$fresh/bin/python" --disable-pip-version-check -q install --no-build-isolation . || return 1
  (cd / && "$fresh/bin/python" -c "
import camox_ops
assert camox_ops.__file__.startswith('$fresh'), camox_ops.__file__
print('imported', camox_ops.__version__, 'from a folder of its own')") || return 1
  (cd / && "$fresh/bin/python" -m camox_ops info)
}
