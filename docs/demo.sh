# What a first user does, in one go: start, ask, look, stop. Run by `make demo`, which sets PROMPT.
set -eu

DEEPINFER_RUNTIME_DIR=$(mktemp -d)
export DEEPINFER_RUNTIME_DIR
trap 'deepinfer-daemon stop >/dev/null 2>&1 || true; rm -rf "$DEEPINFER_RUNTIME_DIR"' EXIT

deepinfer-daemon start --detach --device cpu
echo
echo "> $PROMPT"
deepinfer-daemon chat "$PROMPT"
echo
deepinfer-daemon status
deepinfer-daemon stop
