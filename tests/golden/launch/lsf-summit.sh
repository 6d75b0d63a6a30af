#!/bin/bash
#BSUB -J digits-third-try
#BSUB -nnodes 2
#BSUB -W 1:30
#BSUB -wa USR1 -wt 2
#BSUB -r
#BSUB -Q "75"
#BSUB -o "/work/my runs/digits/job/job.out"
#BSUB -w "ended(41) && ended(42)"
#BSUB -P m1234
#BSUB -alloc_flags "gpumps smt4"

trap '' USR1
unset RIDGELINE_ENDS_AT RIDGELINE_WARN_S RIDGELINE_REQUEUE RIDGELINE_ARRAY
export RIDGELINE_ENDS_AT=$(($(date +%s) + 5400))
set -e
module load cuda
export OMP_NUM_THREADS=8
export NOTE='a "b" $c'
cd -- '/work/my runs'
exec apptainer exec --nv --bind /data '/images/torch 2.sif' python -m supervise --name 'it'"'"'s $HOME' $'two\nlines' </dev/null
