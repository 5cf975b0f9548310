#!/bin/sh
# TaskProlog of Slurm (slurm.conf: TaskProlog=/etc/slurm/stallscope-prolog.sh): what it prints as "export NAME=value"
# is added to the environment of each task. A user traces a job with `sbatch --comment=stallscope`, or with
# STALLSCOPE=1 in its environment; his own sidecar, as a step of the job, reads what the tasks leave:
#   srun --overlap --ntasks-per-node=1 stallscope sidecar --dir "/dev/shm/stallscope-$SLURM_JOB_ID" --end-after 30 &
# Nothing here waits, and nothing fails the task.
LIBRARY=${STALLSCOPE_LIBRARY:-/opt/stallscope/lib/libstallscope.so}
[ "${STALLSCOPE:-0}" = 1 ] || [ "${SLURM_JOB_COMMENT:-}" = stallscope ] || exit 0
[ -r "$LIBRARY" ] || exit 0
FOLDER=/dev/shm/stallscope-${SLURM_JOB_ID:?}
mkdir -m 0700 "$FOLDER" 2>/dev/null
[ -O "$FOLDER" ] || exit 0
echo "export LD_PRELOAD=$LIBRARY${LD_PRELOAD:+:$LD_PRELOAD}"
echo "export STALLSCOPE_SHIM=dir:$FOLDER"
