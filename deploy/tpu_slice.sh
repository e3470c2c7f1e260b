#!/usr/bin/env bash
# Train on all hosts of a Cloud TPU slice, from a machine with gcloud, and start again after a preemption.
#
#   deploy/tpu_slice.sh NAME ZONE FILE_SERVER:/SHARE
#
# v5p-1024 is 512 chips on 128 hosts: the mesh of configs/v4_flash.py. The share is mounted as /shared on every host and
# holds the prepared data and the run. Run it inside tmux: the training ends when the connection does, after saving.
set -euo pipefail

NAME=${1:?name of the slice} ZONE=${2:?zone} SHARE=${3:?file server and path, host:/path}
TYPE=${TYPE:-v5p-1024} RUNTIME=${RUNTIME:-v2-alpha-tpuv5} CONFIG=${CONFIG:-configs/v4_flash.py}
SOURCE=${SOURCE:-/shared/dsv4_jax} # a checkout of this repository on the share
TRIES=${TRIES:-100}

tpu() { gcloud compute tpus tpu-vm "$1" --zone "$ZONE" --quiet "${@:2}"; }
on_all_hosts() { tpu ssh "$NAME" --worker all --command "$1"; }

create() {
  tpu create "$NAME" --accelerator-type "$TYPE" --version "$RUNTIME" --spot
  on_all_hosts "sudo mkdir -p /shared && sudo mount $SHARE /shared"
  on_all_hosts "python3 -m venv ~/venv && ~/venv/bin/pip install --quiet '$SOURCE[tpu,text]'"
}

train() { # exec: a SIGTERM to the connection's shell reaches Python
  on_all_hosts "cd $SOURCE && exec ~/venv/bin/python train.py $CONFIG \
    --data.path /shared/prepared/web --data.prepared /shared/prepared \
    --stages.1.model.remat full --train.distributed auto --train.run-dir /shared/runs/v4_flash ${FLAGS:-}"
}

for ((try = 1; try <= TRIES; try++)); do
  state=$(tpu describe "$NAME" --format 'value(state)' 2>/dev/null || echo MISSING)
  if [ "$state" != READY ]; then
    [ "$state" = MISSING ] || tpu delete "$NAME"
    create
  fi
  if train; then
    exit 0
  fi
  echo "attempt $try ended; the next one continues from the newest checkpoint" >&2
  sleep "${PAUSE:-60}"
done
exit 1
