#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=@FOLDER@/run/job.out
#SBATCH --partition=main

trap '' USR1
unset RIDGELINE_ENDS_AT RIDGELINE_WARN_S RIDGELINE_REQUEUE RIDGELINE_ARRAY
export RIDGELINE_ENDS_AT=$(($(date +%s) + 3600))
set -e
export RIDGELINE_WARN_S=120
export RIDGELINE_REQUEUE=1
cd -- @FOLDER@
exec @PYTHON@ -m ridgeline.cli train @FOLDER@/run --on slurm --here -N 2 -n 2 </dev/null
