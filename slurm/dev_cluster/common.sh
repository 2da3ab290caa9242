# Shared by up and down.
root=${DEV_CLUSTER:-${TMPDIR:-/tmp}/sinkformer-dev-cluster}
# The ports from here on are used; they lie below those that the kernel hands out.
port=${DEV_CLUSTER_PORT:-17817}

say() { echo "dev_cluster: $*" >&2; }

fail() {
    say "$*"
    exit 1
}

# Whether the process whose id a file holds is there.
alive() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }
